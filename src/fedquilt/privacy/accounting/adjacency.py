"""Which two populations a guarantee makes hard to tell apart.

The unit is always one client with everything it holds.  What changes with the
adjacency is what counts as its absence, and with that what may be public and how
far one client can move a sum.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from fedquilt import validate

if TYPE_CHECKING:
    from dp_accounting import NeighboringRelation


class Adjacency(Enum):
    """The neighbouring relation of a guarantee, for a sum of vectors clipped at C.

    ZERO_OUT
        The client's data are replaced by nothing: it answers with the zero
        vector, while the roster and who joins which round stay as they are
        (Kairouz et al. 2021, Definition 1.1).  Public: roster, participation
        history, device tiers, cohort sizes.  The sum moves by at most C, and so
        may be divided by the actual cohort size; a public participation history
        may set noise and clip bounds.  This is the default.  Two worlds with data
        of the client in both are not neighbours: only by way of nothing.
    ADD_REMOVE
        The client is not in the population at all.  Nothing about membership is
        public: not the roster, not the participation history, not the cohort
        size.  The sum moves by at most C, but it may only be divided by a
        constant fixed beforehand.
    REPLACE_ONE
        The client's data are exchanged for any others, or for nothing, while the
        roster and who joins which round stay as they are.  Public: the same as
        under ZERO_OUT.  The sum moves by up to 2·C, from C in one direction to C in
        the opposite.
    """

    ZERO_OUT = "zero_out"
    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"

    @property
    def sensitivity_factor(self) -> float:
        """The L2 sensitivity of a sum of clipped vectors, in units of the clip bound."""
        return 2.0 if self is Adjacency.REPLACE_ONE else 1.0

    @property
    def words(self) -> str:
        """The relation's name in a sentence."""
        return self.value.replace("_", "-")

    @classmethod
    def of(cls, value: object) -> Adjacency:
        """Return the relation itself or the one named by `value`, or raise."""
        if isinstance(value, cls):
            return value
        return cls(validate.choice("adjacency", value, [member.value for member in cls]))

    def relation(self) -> NeighboringRelation:
        """Return dp-accounting's name for this relation."""
        from dp_accounting import NeighboringRelation

        return {
            Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
            Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
            Adjacency.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
        }[self]
