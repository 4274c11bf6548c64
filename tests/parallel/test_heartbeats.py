from vit_jax.parallel.heartbeats import LEFT, Heartbeats


def silent_at(times_and_beats, processes=3, limit=10):
    now = 0
    beats = Heartbeats(processes, limit, clock=lambda: now)
    found = []
    for now, seen in times_and_beats:
        found.append(beats.silent(seen))
    return found


def test_a_beat_that_changes_keeps_a_process_and_one_that_does_not_loses_it():
    looks = [
        (9, {0: "1", 1: "1", 2: "1"}),
        (15, {0: "2", 1: "2", 2: "1"}),
        (19, {0: "3", 1: "3", 2: "1"}),
        (20, {0: "4", 1: "4", 2: "1"}),
    ]
    assert silent_at(looks) == [None, None, None, 2]


def test_one_that_never_began_is_lost_after_the_limit():
    assert silent_at([(10, {0: "1", 2: "1"}), (11, {0: "1", 2: "1"})]) == [None, 1]


def test_one_that_left_in_order_is_not_lost():
    looks = [(5, {0: "1", 1: LEFT, 2: "1"}), (14, {0: "2", 1: LEFT, 2: "2"})]
    assert silent_at([*looks, (99, {0: "3", 1: LEFT, 2: "3"})]) == [None] * 3


def test_after_a_pause_of_this_process_the_others_count_as_alive():
    looks = [(5, {0: "1", 1: "1", 2: "1"}), (500, {0: "2", 1: "90", 2: "91"})]
    assert silent_at(looks) == [None, None]
