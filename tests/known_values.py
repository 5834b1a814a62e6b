"""Values of small tensors that models branch on, and the assumptions about the rest."""

from __future__ import annotations

from memsize.known_values.data_dependent import (
    ALL_DISTINCT as ALL_DISTINCT,
    ALL_FINITE as ALL_FINITE,
    ALL_SELECTED as ALL_SELECTED,
    BALANCED as BALANCED,
    CHECKS_PASS as CHECKS_PASS,
    COMPARED_EQUAL as COMPARED_EQUAL,
    COPIED_VALUES as COPIED_VALUES,
    CPU_AUTOCAST as CPU_AUTOCAST,
    EXCHANGED_ARE_ALIKE as EXCHANGED_ARE_ALIKE,
    FIXED_DRAW as FIXED_DRAW,
    ITEM_IS_ONE as ITEM_IS_ONE,
    MASKS_COVER_IMAGE as MASKS_COVER_IMAGE,
    MIXED_DEVICES as MIXED_DEVICES,
    NOT_EQUAL as NOT_EQUAL,
    REDUCED_IS_ONE as REDUCED_IS_ONE,
    UNCOMPILED as UNCOMPILED,
    Routing as Routing,
    first_assumption as first_assumption,
    imbalanced as imbalanced,
    spread_choices as spread_choices,
)
from memsize.known_values.toeplitz import diagonals_of as diagonals_of, filled as filled
from memsize.known_values.values import (
    constant_of as constant_of,
    set_constant as set_constant,
    set_filled as set_filled,
    state_of as state_of,
)
