// What the theme builds in the browser, for readers who have no mouse: tables and formulas that are
// wider than the page can be scrolled by keyboard, each bar of buttons beside code has a name, and
// the parts of a table of contents, whose headings may be alike, are named with what they are in.
function mend() {
  document.querySelectorAll(".md-nav--secondary .md-nav .md-nav:not([data-named])").forEach((part) => {
    const outer = part.parentElement.closest(".md-nav").ariaLabel;
    part.setAttribute("aria-label", `${outer}: ${part.ariaLabel}`);
    part.dataset.named = "";
  });
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((bar, index) => {
    bar.setAttribute("aria-label", `Code ${index + 1}`);
  });
  document.querySelectorAll(".md-typeset__scrollwrap, math[display=block]").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
  });
}
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
document.addEventListener("toggle", mend, true); // a folded table has no width
addEventListener("resize", mend);
mend();
