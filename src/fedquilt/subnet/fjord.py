"""FjORD's helper: the loss with self-distillation (Horvath et al. 2021, section 3.2)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from fedquilt import validate


def self_distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    alpha: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Return (1 - alpha) CE(student, labels) + alpha T^2 KL(teacher_T || student_T).

    The student is the narrow pass and the teacher the widest one the client can
    run; no gradient goes through the teacher.  T divides both sides' logits, and
    T^2 keeps the size of the gradient (Hinton et al. 2015).
    """
    validate.number("alpha", alpha, at_least=0, at_most=1)
    validate.number("temperature", temperature, above=0)
    hard = functional.cross_entropy(student_logits, labels)
    soft = functional.kl_div(
        functional.log_softmax(student_logits / temperature, dim=-1),
        functional.log_softmax(teacher_logits.detach() / temperature, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return (1 - alpha) * hard + alpha * temperature**2 * soft
