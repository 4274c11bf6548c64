"""How often loops run, as TPU's compiler writes them: with a counter, no number."""

import pytest

from vit_jax.tools.planning import analysis, costs, hlo

LOOP = """
HloModule m

%compared (c: s32[], d: s32[]) -> pred[] {
  %c = s32[] parameter(0)
  %d = s32[] parameter(1)
  ROOT %fused = pred[] compare(%c, %d), direction=DIRECTION
}

%cond (p: (s32[], f32[6], s32[], s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(LIMIT)
  %p = (s32[]{:T(128)}, f32[6]{0}, s32[], s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %held = s32[] get-tuple-element(%p), index=2
  ROOT %less = pred[]{:T(512)} CONDITION
}

%body (q: (s32[], f32[6], s32[], s32[])) -> (s32[], f32[6], s32[], s32[]) {
  %q = (s32[]{:T(128)}, f32[6]{0}, s32[], s32[]) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %x = f32[6]{0} get-tuple-element(%q), index=1
  %kept = s32[] get-tuple-element(%q), index=2
  %other = s32[] get-tuple-element(%q), index=3
  %copied = s32[]{:T(128)S(6)} copy(%j)
  %step = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} ADVANCE
  %sum = f32[6]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %r = (s32[]{:T(128)}, f32[6]{0}, s32[], s32[]) tuple(%next, %sum, %HELD, %other)
}

ENTRY %main (a: f32[6], n: s32[]) -> f32[6] {
  %a = f32[6]{0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[]{:T(128)} constant(FIRST)
  %bound = s32[] constant(LIMIT)
  %t = (s32[]{:T(128)}, /*index=1*/f32[6]{0}, s32[], s32[]) tuple(%BEGIN, %a, %bound, %n)
  %w = (s32[]{:T(128)}, f32[6]{0}, s32[], s32[]) while(%t), condition=%cond, body=%body KNOWN
  ROOT %out = f32[6]{0} get-tuple-element(%w), index=1
}
"""
COMPARED = "compare(%i, %limit), direction=DIRECTION"
TURNED = "compare(%limit, %i), direction=DIRECTION"
HELD = "compare(%i, %held), direction=DIRECTION"
FUSED = "fusion(%i, %limit), kind=kLoop, calls=%compared"


def loop(first=0, limit=12, step=1, direction="LT", condition=COMPARED, **words):
    words = {
        "CONDITION": condition,  # Before the words that it holds.
        "ADVANCE": "add(%copied, %step)",
        "HELD": "kept",
        "BEGIN": "zero",
        "KNOWN": "",
        **{name.upper(): value for name, value in words.items()},
        "FIRST": first,
        "LIMIT": limit,
        "STEP": step,
        "DIRECTION": direction,
    }
    text = LOOP.replace("%HELD)", "%HELD)")
    for name, value in words.items():
        text = text.replace(name, str(value))
    module = hlo.parse(text)
    return module, module.rounds(module.by_name["w"])


@pytest.mark.parametrize(
    ("first", "limit", "step", "direction", "condition", "rounds"),
    [
        (0, 12, 1, "LT", COMPARED, 12),
        (2, 12, 1, "LT", COMPARED, 10),
        (-3, 12, 1, "LT", COMPARED, 15),
        (0, 12, 2, "LT", COMPARED, 6),
        (1, 12, 3, "LT", COMPARED, 4),
        (0, 12, 1, "LE", COMPARED, 13),
        (12, 0, -1, "GT", COMPARED, 12),
        (11, 0, -4, "GE", COMPARED, 3),
        (0, 12, 3, "NE", COMPARED, 4),
        (12, 12, 1, "LT", COMPARED, 0),
        (0, 12, 5, "GT", TURNED, 3),
        (0, 12, 2, "LT", HELD, 6),
        (0, 12, 2, "LT", FUSED, 6),
    ],
)
def test_rounds_are_read_from_the_counter_of_a_loop(
    first, limit, step, direction, condition, rounds
):
    module, found = loop(first, limit, step, direction, condition)
    assert found == rounds
    assert module.unread() == []
    exchanged = costs.find_collectives(module, [0] * 8)
    assert [(one.kind, one.times) for one in exchanged] == [("all-reduce", rounds)]
    # The same as the loop that it stands for.
    tests = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__}
    test = tests.get("LT" if condition == TURNED else direction, int.__ne__)
    ran, now = 0, first
    while test(now, limit):
        ran, now = ran + 1, now + step
    assert ran == rounds


def test_xlas_own_word_for_the_rounds_goes_first():
    word = 'backend_config={"known_trip_count":{"n":"5"}}'
    assert loop(known=f", {word}")[1] == 5


@pytest.mark.parametrize(
    "words",
    [
        {"advance": "multiply(%copied, %step)"},
        {"advance": "add(%copied, %copied)"},
        {"advance": "add(%copied, %other)"},
        {"advance": "subtract(%step, %copied)"},
        {"advance": "copy(%other)"},
        {"begin": "n"},
        {"step": 0},
        {"step": -1},
        {"step": 5, "direction": "NE"},
        {"direction": "EQ"},
        {"condition": "and(%i, %limit)"},
        {"condition": HELD, "held": "next"},
        {"condition": "compare(%i, %i), direction=LT"},
    ],
    ids=str,
)
def test_rounds_that_cannot_be_read_are_not_guessed(words):
    module, rounds = loop(**words)
    assert rounds is None
    assert [one.name for one in module.unread()] == ["w"]
    assert analysis._unread(module) == 1
    assert [one.times for one in costs.find_collectives(module, [0] * 8)] == [1]


def test_a_loop_that_only_draws_numbers_may_run_as_often_as_it_likes():
    text = LOOP.replace(
        "all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add",
        "negate(%x)",
    )
    text = text.replace("CONDITION", "and(%i, %limit)").replace("%HELD", "%kept")
    text = text.replace("ADVANCE", "add(%j, %step)").replace("%BEGIN", "%zero")
    module = hlo.parse(text)
    assert len(module.unread()) == 1
    assert analysis._unread(module) == 0
