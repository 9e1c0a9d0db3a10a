"""Which tests prove each row of the fault list, and the table of README.md that is made of them.

`python tests/system/faults/fault_table.py` writes the table. Its figures are those that tests measured: `pytest
--figures tests/system/faults/figures.json`, at any time and for any part of the tests, adds them to the file.
`fault_table.py default` and `fault_table.py slow` print the tests that run so, for pytest.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
README, FIGURES = HERE / "README.md", HERE / "figures.json"
sys.path.append(str(ROOT / "tests" / "helpers"))  # this is a program, too
import figures  # noqa: E402

MOST_TEXTS = 6
"""Of a test in the table."""
BEGIN, END = "<!-- written by fault_table.py -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Row:
    fault: str
    holds: str
    """What must be so."""
    tests: tuple[str, ...]
    """Files relative to tests/, then the name."""


FAULTS = "system/faults/test_"
STRANGERS = "system/test_strangers.py::test_"
ROWS = {
    1: Row(
        "kill -9 of a node in the middle of a swap, 20 times at random phases",
        "the others' next round within one exchange timeout; at most one fragment one-sided; nothing left over",
        (
            "rounds/test_swap.py::test_wherever_it_breaks_at_most_one_fragment_is_one_sided",
            "rounds/test_rounds_in_memory.py::test_a_partner_that_vanishes_in_the_middle_costs_its_deadline_and_no_more",
            FAULTS + "killed.py::test_twenty_kills_in_the_middle_of_swaps",
        ),
    ),
    2: Row(
        "kill -9 of the node's main process only",
        "its p2pd and workers are gone within 5 s",
        (
            "transport/test_libp2p.py::test_nothing_is_left_after_kill_9",
            "node/test_three_nodes.py::test_a_killed_node_leaves_nothing_and_the_others_go_on",
        ),
    ),
    3: Row(
        "kill -9 of p2pd",
        "noticed within 5 s, back in a round within 30 s, `status` says degraded meanwhile",
        (
            "transport/test_libp2p.py::test_the_end_of_p2pd_is_noticed_and_another_one_started",
            FAULTS + "lost_daemon.py::test_a_p2pd_that_is_killed_is_replaced",
            FAULTS + "lost_daemon.py::test_a_p2pd_that_hangs_is_replaced",
            FAULTS + "lost_daemon.py::test_status_tells_of_a_p2pd_that_dies_again_and_again",
        ),
    ),
    4: Row(
        "SIGTERM in a round; a second one",
        "exit 0 within 10 s; within 1 s",
        (
            "node/test_three_nodes.py::test_all_leave_cleanly_and_nothing_is_left",
            "node/test_leaving.py::test_a_network_that_hangs_holds_nobody",
            FAULTS + "killed.py::test_sigterm_in_the_middle_of_a_swap",
            FAULTS + "lost_daemon.py::test_leaving_is_quick_and_asked_twice_it_is_immediate",
        ),
    ),
    5: Row(
        "churn for 10 minutes, a death every 20 s on average, six nodes",
        "never 60 s without progress; loss within 5% of a calm run",
        (
            "rounds/test_many_nodes.py::test_lost_messages_and_a_tenth_that_vanishes",
            FAULTS + "churn.py::test_a_storm_of_kills_and_joins",
        ),
    ),
    6: Row(
        "partition 3 and 3 for 60 s, then healed",
        "both halves train; within 60 s of healing they exchange; the spread of weights falls again",
        (
            "rounds/test_rounds_in_memory.py::test_a_partition_lets_both_halves_go_on_and_heals",
            FAULTS + "partition.py::test_two_halves_go_on_and_find_together_again",
        ),
    ),
    7: Row(
        "bootstrap dead at the start; dies later",
        "exit 10 within 20 s with the remedy; later: no effect, newcomers come in by cached peers",
        (
            "node/test_errors.py::test_a_bootstrap_that_refuses",
            FAULTS + "lost_rendezvous.py::test_a_dead_rendezvous_is_missed_by_nobody_who_knew_a_peer",
        ),
    ),
    8: Row(
        "a peer stopped for 30 s (SIGSTOP); a peer at 256 kbit/s",
        "dropped at the deadline; the others (paced task) keep 95% of their step rate",
        (
            FAULTS + "frozen_partner.py::test_a_partner_that_freezes_costs_a_round_and_no_step",
            FAULTS + "slow_peer.py::test_a_frozen_peer_and_one_behind_a_slow_link_cost_no_step",
            "node/test_pace.py::test_a_slow_box_holds_nobody_back",
        ),
    ),
    9: Row(
        "joining while others train; the donor killed at half of the download",
        "the state of that version; the donor's step time grows by less than 10%; resumed from another at 45% or later",
        (
            "state_transfer/test_state_transfer.py::test_what_came_before_a_break_is_not_sent_again",
            "state_transfer/test_state_transfer.py::test_another_donor_takes_over",
            FAULTS + "joining.py::test_a_newcomer_begins_where_its_donor_is",
            FAULTS + "joining.py::test_a_donor_that_dies_half_way_is_replaced",
        ),
    ),
    10: Row(
        "a donor that lies: wrong bytes, stale, another run",
        "rejected, the next donor used",
        (
            "state_transfer/test_state_transfer.py::test_another_run_or_layout_is_refused",
            "state_transfer/test_state_transfer.py::test_a_faulty_donor_is_a_peer_fault",
            "state_transfer/test_state_transfer.py::test_the_next_donor_is_asked_instead",
            "state_transfer/test_state_transfer.py::test_two_witnesses_must_agree_and_the_lower_of_two_rounds_is_believed",
        ),
    ),
    11: Row(
        "NaN, Inf, norm × 1000, weight 1e30, wrong shapes from a partner",
        "rejected before it is applied; the sender is counted against; loss unaffected",
        (
            "core/test_bounds.py::test_what_is_not_finite_is_refused",
            "core/test_bounds.py::test_far_beyond_nothing_is_applied",
            "core/test_standing.py::test_a_standing_counts_what_was_seen",
            "training/test_hostile_partners.py::test_one_swap_moves_no_more_than_twice_what_honest_ones_do",
            "wire/test_messages.py::test_a_bad_field_is_named",
            STRANGERS + "the_largest_numbers_do_no_harm",
        ),
    ),
    12: Row(
        "one of six flips signs for the whole run",
        "final loss within 5% of a clean run",
        (
            "simulate/test_attacks.py::test_without_defences_one_swap_ruins_a_replica_and_with_them_it_is_refused",
            FAULTS + "lies.py::test_one_of_six_flips_signs",
        ),
    ),
    13: Row(
        "a frame that claims 1 TiB; a stream that trickles; 10,000 streams",
        "memory grows by less than 64 MiB; closed within 1 s and 10 s; others unaffected",
        (
            "transport/test_transport_contract.py::test_a_message_over_the_limit_is_refused_in_both_directions",
            "transport/test_grpc_bridge.py::test_a_peer_has_few_connections_and_a_stranger_two",
            "rounds/test_swap.py::test_signs_of_life_and_pieces_are_no_progress",
            "rounds/test_swap.py::test_a_flood_of_small_messages_is_a_fault",
            "transport/test_libp2p.py::test_a_p2pd_into_which_strangers_write_too_much_is_replaced",
            FAULTS + "garbage.py::test_frames_without_end_and_streams_without_number",
        ),
    ),
    14: Row(
        "garbage: 10,000 random and mutated messages on each service",
        "no crash, no unhandled traceback",
        (
            "wire/test_messages.py::test_garbage_is_an_error_of_ours_or_a_frame",
            "state_transfer/test_state_transfer.py::test_whatever_arrives_ends_as_a_fault_or_as_the_state",
            FAULTS + "garbage.py::test_garbage_on_each_service",
        ),
    ),
    15: Row(
        "a replayed message, an old round, another run's id",
        "refused and counted",
        (
            "rounds/test_rounds_in_memory.py::test_a_replayed_exchange_is_refused",
            "rounds/test_rounds_in_memory.py::test_an_offer_that_does_not_fit_is_refused_by_its_code",
            "rounds/test_rounds_in_memory.py::test_a_node_that_comes_back_and_repeats_its_rounds_is_no_replay",
        ),
    ),
    16: Row(
        "two nodes with one identity",
        "the second exits 14, the first is unaffected",
        (
            "transport/test_libp2p.py::test_an_identity_that_is_in_use_is_refused_and_the_first_node_keeps_it",
            FAULTS + "wrong_settings.py::test_a_second_node_with_the_same_identity",
        ),
    ),
    17: Row(
        "an uninvited key, an expired token, a wrong manifest hash",
        "refused before any payload, with a reason on both sides",
        (
            "rounds/test_rounds_in_memory.py::test_an_offer_that_does_not_fit_is_refused_by_its_code",
            "run/test_manifest.py::test_signatures",
            "rounds/test_who_may_swap.py::test_refused_before_any_payload_with_the_reason_on_both_sides",
            "node/test_by_invitation.py::test_who_is_invited_joins_with_one_line_and_nobody_else",
        ),
    ),
    18: Row(
        "DHT hijack (expiry a billion seconds ahead), a 1 MB record, 10,000 keys",
        "ignored; memory bounded",
        (
            "peers/test_directory.py::test_hostile_records_are_not_stored_and_hide_no_peer",
            "peers/test_dht_storage.py::test_nothing_is_stored_for_longer_than_twice_the_lifetime",
            "peers/test_dht_storage.py::test_a_flood_replaces_no_record_and_expires",
            "peers/test_dht_storage.py::test_ten_thousand_keys_take_a_bounded_part_of_the_memory",
        ),
    ),
    19: Row(
        "clock off by 5 s, by an hour",
        "works, or exits 11 with the remedy",
        (
            "observe/test_health.py::test_a_clock_too_far_off_ends_the_start",
            "observe/test_health.py::test_one_witness_keeps_nobody_out_and_both_clocks_are_named",
            FAULTS + "wrong_settings.py::test_a_clock_that_is_off",
        ),
    ),
    20: Row(
        "disk full at a checkpoint; a crash while one is written",
        "training goes on with a health line; the last good one loads",
        (
            "training/test_resume.py::test_killed_while_it_saves",
            "checkpoints/test_checkpoint.py::test_a_full_disk_leaves_nothing_and_takes_nothing",
            FAULTS + "small_disk.py::test_a_full_disk_costs_the_checkpoint_and_no_training",
            FAULTS + "small_disk.py::test_it_resumes_from_the_newest_that_is_whole",
        ),
    ),
    21: Row(
        "256 file descriptors; 64 MiB of /dev/shm",
        "works, or exits and names the setting",
        (
            "transport/test_reachability.py::test_a_machine_out_of_descriptors_looks_again_when_it_has_some",
            FAULTS + "wrong_settings.py::test_few_descriptors_and_little_shared_memory",
            FAULTS + "wrong_settings.py::test_few_descriptors_and_many_streams",
        ),
    ),
    22: Row(
        "both nodes behind NAT, full cone and symmetric (`--random-fully`)",
        "they exchange, and the path (direct or relayed) is shown",
        (
            FAULTS + "nat.py::test_two_behind_routers_exchange",
            FAULTS + "nat.py::test_with_one_of_them_reachable_no_relay_is_used",
            FAULTS + "nat.py::test_a_port_that_the_router_maps_is_a_direct_way_in",
        ),
    ),
    23: Row(
        "one version older; unknown fields",
        "works; two older: exit 12",
        (
            "wire/test_golden.py::test_a_message_of_each_version_still_means_the_same",
            "wire/test_messages.py::test_unknown_fields_of_a_newer_node_are_passed_over",
            "run/test_manifest.py::test_a_run_of_each_version_is_the_same_run",
            FAULTS + "versions.py::test_the_version_before_swaps_with_this_one",
            FAULTS + "versions.py::test_another_protocol_is_said",
        ),
    ),
    24: Row(
        "an hour of random faults from a seed",
        "never 5 minutes without progress; memory's slope under 16 MiB an hour; objects and descriptors flat",
        (
            FAULTS + "random_faults.py::test_a_plan_is_its_seed_s",
            FAULTS + "random_faults.py::test_random_faults",
        ),
    ),
    25: Row(
        "a peer that lies about progress, speed, tokens or loss",
        "no other node's learning rate, weights or partners move by more than an honest median would",
        (
            "state_transfer/test_catch_up.py::test_one_record_that_claims_to_be_far_ahead_is_not_enough",
            "state_transfer/test_catch_up.py::test_a_donor_that_claims_to_be_at_the_runs_end_is_not_believed",
            "peers/test_size_estimate.py::test_a_few_exaggerated_estimates_change_nothing",
            FAULTS + "lies.py::test_whom_a_node_may_call_does_not_depend_on_what_they_say_of_themselves",
            FAULTS + "lies.py::test_false_figures_of_a_peer_move_nobody",
        ),
    ),
    26: Row(
        "one swap of zeros with tiny range wishes",
        "honest swaps go on at the next round, bytes and error as before within 3 rounds",
        (
            "training/test_hostile_partners.py::test_one_swap_moves_no_more_than_twice_what_honest_ones_do",
            STRANGERS + "one_hostile_peer_beside_three_honest_nodes",
        ),
    ),
    27: Row(
        "u' = -u, 2u, 10u, noise of the honest norm, in every codec; 1e30 in elements sent again",
        "one swap moves at most twice what honest ones move; loss within 5%; no checkpoint of it is gone back to",
        (
            "training/test_hostile_partners.py::test_one_swap_moves_no_more_than_twice_what_honest_ones_do",
            "checkpoints/test_keeper.py::test_the_newest_that_was_not_harmed",
            STRANGERS + "one_hostile_peer_beside_three_honest_nodes",
        ),
    ),
    28: Row(
        "an identity that always calls again; 20 of them on one host",
        "at most twice its uniform share of a node's rounds; all of one host together at most a quarter",
        (
            "rounds/test_greedy_peers.py::test_who_always_calls_again_gets_at_most_twice_its_share",
            "rounds/test_greedy_peers.py::test_twenty_identities_of_one_place_get_at_most_a_quarter",
            "rounds/test_greedy_peers.py::test_three_nodes_that_sixty_identities_keep_busy_still_meet",
            STRANGERS + "one_hostile_peer_beside_three_honest_nodes",
        ),
    ),
    29: Row(
        "a swap held by silence, `Alive` frames, one byte at a time",
        "at most two phases the first time, then less and less: at most 5% of a node's rounds in all",
        (
            "rounds/test_greedy_peers.py::test_held_swaps_cost_less_and_less",
            "core/test_round.py::test_a_swap_that_does_not_get_on_is_given_up_after_two_boundaries_while_others_wait",
            STRANGERS + "one_hostile_peer_beside_three_honest_nodes",
        ),
    ),
    30: Row(
        "500 presences with throw-away keys from one caller",
        "a newcomer has its state within 60 s; nobody's rounds suffer; file descriptors flat",
        (
            "peers/test_directory.py::test_500_throw_away_presences_of_one_caller_hide_no_peer",
            "peers/test_answering.py::test_500_addresses_that_swallow_calls_are_through_within_a_minute_and_a_bounded_"
            "number_at_a_time",
            STRANGERS + "a_newcomer_gets_an_honest_state",
        ),
    ),
    31: Row(
        "three donors of five that lie (random weights, round 4900 of 5000)",
        "the newcomer begins from an honest state within 90 s",
        (
            "state_transfer/test_cross_check.py::test_of_five_donors_of_which_three_lie_a_newcomer_takes_an_honest_ones"
            "_state",
            STRANGERS + "a_newcomer_gets_an_honest_state",
        ),
    ),
    32: Row(
        "fake divergence: rows 26, 30 and 31 together against two honest nodes",
        "neither gives up its own state",
        (
            "state_transfer/test_cross_check.py::test_fake_divergence_two_honest_nodes_and_a_crowd",
            STRANGERS + "two_honest_nodes_do_not_believe_a_crowd_that_they_diverged",
        ),
    ),
    33: Row(
        "33 identities with 4 connections each",
        "partners unaffected, a newcomer in within 60 s",
        (
            "transport/test_grpc_bridge.py::test_33_identities_with_4_connections_each_keep_no_newcomer_out",
            STRANGERS + "a_newcomer_gets_an_honest_state",
        ),
    ),
    34: Row(
        "NaN or Inf in φ at a boundary; steps that skip; roll-back and then adopting an older round",
        "goes on from the last good checkpoint; nothing of it is offered; corrections land afterwards",
        (
            "training/test_thread.py::test_slow_weights_that_are_not_finite_at_a_boundary",
            "training/test_thread.py::test_weights_whose_steps_are_skipped_are_not_offered",
            "training/test_thread.py::test_after_a_roll_back_offers_of_an_earlier_round_that_was_adopted_count",
            "rounds/test_rolled_back.py::test_a_roll_back_breaks_the_swap_for_both",
        ),
    ),
    35: Row(
        "a crafted `inner.pt`, a FIFO, wrong dtypes and names, a manifest of 2e9 layers",
        "the checkpoint before is used, or refused within a second, in one sentence",
        (
            "checkpoints/test_saved_state.py::test_a_wrong_value_costs_one_checkpoint",
            "checkpoints/test_saved_state.py::test_an_inner_file_that_is_no_state",
            "checkpoints/test_saved_state.py::test_vectors_of_another_type",
            "checkpoints/test_saved_state.py::test_a_fifo_in_the_place_of_a_file",
            "run/test_manifest.py::test_a_strangers_manifest_of_endless_layers_is_refused_at_once",
        ),
    ),
    36: Row(
        "GPU memory taken by another program while training",
        "pauses, goes on, the micro-batch grows back",
        (
            "training/test_memory_shortage.py::test_it_waits_says_so_and_answers",
            "training/test_memory_shortage.py::test_whatever_fails_the_losses_are_the_same_and_the_node_stays",
            "training/test_memory_shortage.py::test_a_smaller_micro_batch_grows_back",
        ),
    ),
}


@cache
def marks(file: str) -> dict[str, str]:
    """Of each test in a file under tests/: its decorators and those of its module, as source."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    whole = "".join(ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f.name: whole + " ".join(map(ast.unparse, f.decorator_list)) for f in functions}


def runs(test: str) -> str:
    file, _, name = test.partition("::")
    return "`--slow`" if "mark.slow" in marks(file)[name] else "by default"


def lines(measured: dict[str, figures.Entry]) -> Iterator[str]:
    yield "| | fault, and what must hold | test | runs | measured |\n|---|---|---|---|---|\n"
    for number, row in ROWS.items():
        about = f"**{row.fault}**: {row.holds}"
        for test in row.tests:
            entry = measured.get(f"tests/{test}")
            yield f"| {number} | {about} | `{test.replace('::', '` `')}` | {runs(test)} | {said(entry)} |\n"
            about = ""


def said(entry: figures.Entry | None) -> str:
    if entry is None:
        return "not yet"
    found = "; ".join([entry.outcome, f"{entry.seconds:.2g} s" if entry.seconds < 1 else f"{entry.seconds:.0f} s"])
    texts = entry.figures if len(entry.figures) <= MOST_TEXTS else [f"{len(entry.figures)} figures, in figures.json"]
    return f"{found}; {entry.on}" + "".join(f"<br>{text}" for text in texts).replace("|", "\\|")


def written() -> str:
    """README.md with the table of the figures in figures.json."""
    head, _, rest = README.read_text().partition(BEGIN)
    return head + BEGIN + "".join(lines(figures.read(FIGURES))) + END + rest.partition(END)[2]


def main(words: list[str]) -> None:
    tests = {f"tests/{test}": runs(test) for row in ROWS.values() for test in row.tests}
    if not words:  # pytest may have run more tests than these
        figures.write(FIGURES, {test: entry for test, entry in figures.read(FIGURES).items() if test in tests})
        README.write_text(written())
        return
    kind = {"default": "by default", "slow": "`--slow`"}[words[0]]
    print("\n".join(test for test, runs_when in tests.items() if runs_when == kind))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
