// Following a run: the server says when there is something new, and the page fetches it.
function follow(live, update) {
  const light = el("span", { class: "state", role: "status" }, "connecting");
  put(document.getElementById("tools"), light);
  const say = (text, kind) => { light.textContent = text; light.className = `state ${kind}`; };
  let busy = false, again = false;
  async function fetchData() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch(live.data, { cache: "no-store", credentials: "omit" });
      const found = await answer.json();
      if (found.error) say(found.error, "off");
      else { update(found); say("connected", "on"); }
    } catch {
      say("not reachable", "off");
    }
    busy = false;
    if (again) { again = false; fetchData(); }
  }
  const source = new EventSource(live.events);
  source.addEventListener("open", fetchData);
  source.addEventListener("changed", fetchData);
  source.addEventListener("error", () => say("not reachable: trying again", "off"));
}
