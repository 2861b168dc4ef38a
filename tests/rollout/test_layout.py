"""Plans of rollout servers: where engines lie, and what is refused with group, needed and available."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.deploy.description import Description, GroupSpec, Machines, ModelSpec, WorkerType, read_description
from rollout.deploy.layout import describe_flags, plan_layout
from rollout.deploy.plan import table
from rollout.main import main
from samples.errors import InputError

LAYOUTS = Path(__file__).parent / "layouts"
WHERE = ["0:0-7", "1:0-7", "(shared", "with", "training)"]  # columns of a plan, split


def planned(name):
    return plan_layout(read_description(LAYOUTS / name))


def places(layout):
    return {engine.name: [(share.node, *share.devices) for share in engine.shares] for engine in layout.engines}


def refusal(description):
    with pytest.raises(InputError) as caught:
        plan_layout(description)
    return str(caught.value)


def one_model(*groups, **machines):
    return Description(models=(ModelSpec(name="actor", server_groups=groups),), machines=Machines(**machines))


def test_engines_take_devices_in_the_order_of_the_groups():
    layout = planned("one_model.toml")
    assert places(layout) == {
        "actor-0-regular-0": [(0, 0, 1)],
        "actor-0-regular-1": [(0, 2, 3)],
        "actor-0-regular-2": [(0, 4, 5)],
        "actor-0-regular-3": [(0, 6, 7)],
        "actor-1-regular-0": [(1, 0, 1, 2, 3)],
        "actor-1-regular-1": [(1, 4, 5, 6, 7)],
    }
    assert layout.engines[-1].overrides == {"mem_fraction_static": 0.8, "context_length": 32768}
    assert layout.engines[0].overrides == {}


def test_a_model_with_a_path_of_its_own_is_frozen_and_stands_behind_its_own_router():
    layout = planned("prefill_decode_and_frozen.yaml")
    actor, judge = layout.models
    assert (actor.disaggregated, actor.updates_weights) == (True, True)
    assert (judge.disaggregated, judge.updates_weights) == (False, False)
    assert [engine.updates_weights for engine in judge.engines] == [False]
    assert places(layout)["judge-0-regular-0"] == [(1, 4, 5, 6, 7)]


def test_an_engine_may_span_whole_nodes_and_says_which_it_shares_with_training():
    layout = planned("several_nodes_colocated.yaml")
    first, *encoders = layout.engines
    assert [share.node for share in first.shares] == [0, 1]
    assert first.shares_with_trainer
    assert [engine.shares[0].devices for engine in encoders] == [(4,), (5,), (6,), (7,)]
    assert not any(engine.shares_with_trainer for engine in encoders)


def test_external_servers_need_no_device():
    layout = planned("external.toml")
    assert (layout.slots, layout.nodes, layout.engines) == (0, 0, [])
    assert layout.models[0].external_engine_addrs == ("10.0.0.5:30000", "[fd00::7]:30000")
    assert table(layout)[-1] == "0 engines on 0 devices, 2 external, 1 router"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wrong_indivisible.yaml",
            (
                "model actor, group 0 (regular): engines of 4 need a multiple of 4 devices, 6 are available to the "
                "group; use num_gpus = 4 or 8"
            ),
        ),
        (
            "wrong_too_many.toml",
            (
                "needed are 10 devices (model actor, group 0 (regular) 8; model judge, group 0 (regular) 2), available "
                "are 8 (rollout_num_gpus)"
            ),
        ),
        (
            "wrong_node_boundary.yaml",
            (
                "model actor, group 1 (regular): engine 0 needs 4 devices of one node, 2 are available on node 0 "
                "(of 8); put a placeholder group of 2 before it, or reorder groups"
            ),
        ),
        ("wrong_prefill_alone.yaml", "model actor: has a prefill group and no decode group: it needs at least one"),
    ],
)
def test_a_wrong_description_is_refused_with_group_needed_and_available(name, message, capsys):
    assert main(["plan", "--config", str(LAYOUTS / name)]) == 2
    assert capsys.readouterr().err == f"accelrl: error: {message}\n"


def test_the_command_prints_a_row_an_engine_and_a_summary(capsys):
    assert main(["plan", "--config", str(LAYOUTS / "several_nodes_colocated.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "group", "type", "engine", "devices", "node:devices", "weights"]
    assert lines[1].split() == [
        "actor",
        "0",
        "regular",
        "0",
        "16",
        *["0:0-7", "1:0-7", "(shared", "with", "training)"],
        "updated",
    ]
    assert lines[2].split() == ["actor", "1", "placeholder", "-", "4", "2:0", "to", "2:3", "-"]
    assert lines[-1] == "5 engines on 24 devices on 3 nodes of 8, 0 external, 1 router"


def test_flags_win_over_the_files_machines(capsys):
    assert main(["plan", "--config", str(LAYOUTS / "wrong_node_boundary.yaml"), "--num-gpus-per-node", "16"]) == 0
    assert main(["plan", "--config", str(LAYOUTS / "one_model.toml"), "--rollout-num-gpus", "12"]) == 2
    assert "needed are 16 devices" in capsys.readouterr().err


def test_flags_alone_make_a_plan():
    layout = plan_layout(describe_flags(rollout_num_gpus=4, num_gpus_per_engine=2, prefill_num_servers=1))
    assert [engine.worker_type for engine in layout.engines] == [WorkerType.PREFILL, WorkerType.DECODE]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plan"], "give --config FILE"),
        (["plan", "--rollout-num-gpus", "4", "--prefill-num-servers", "4"], "group prefill needs 4 devices, 4 are"),
        (["plan", "--rollout-num-gpus", "0"], "nothing would answer"),
        (["plan", "--rollout-num-gpus", "2", "--rollout-external-engine-addrs", "h:1"], "use --rollout-num-gpus 0"),
        (["plan", "--config", "x.toml", "--prefill-num-servers", "1"], "--prefill-num-servers with --config x.toml"),
        (["plan", "--config", "x.json"], "x.json: cannot be read"),
    ],
)
def test_flags_that_make_no_plan_are_refused(argv, words, capsys):
    assert main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: []", "models: []: Tuple should have at least 1 item"),
        ("model: []", "models: is missing"),
        ("models: [{name: a, server_groups: [{num_gpu: 1}]}]", "models[0].server_groups[0].num_gpu: no such key here"),
        (
            "models: [{name: a, server_groups: [{num_gpus: 0}]}]",
            "server_groups[0].num_gpus: 0: must be greater",
        ),
        ("models: [{name: a, server_groups: [{num_gpus: true}]}]", "a whole number is needed, not true or false"),
        ("models: [{name: a, server_groups: [{num_gpus: 1, worker_type: both}]}]", "worker_type: 'both': must be"),
        ("sglang: []\nmodels: []", "two names of one list"),
        ("- 1", "expected a table with 'models', found list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_description_that_cannot_be_read_names_the_place(tmp_path, text, words):
    path = tmp_path / "layout.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_description(path)
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_devices_that_would_stand_idle_are_refused_unless_a_placeholder_says_so():
    assert "6 would stand idle" in refusal(one_model(GroupSpec(num_gpus=2), rollout_num_gpus=8))
    spare = GroupSpec(worker_type=WorkerType.PLACEHOLDER, num_gpus=6)
    assert plan_layout(one_model(GroupSpec(num_gpus=2), spare, rollout_num_gpus=8)).slots == 8


def test_an_engine_shares_all_its_devices_with_training_or_none():
    said = refusal(one_model(GroupSpec(num_gpus=4, num_gpus_per_engine=4), actor_num_gpus=2, colocate=True))
    assert "group 0 (regular): engine 0 needs 4 devices that all train or none, available are 2 that train" in said


def test_an_engine_larger_than_a_node_takes_whole_nodes():
    assert "spans nodes of 8 unevenly" in refusal(one_model(GroupSpec(num_gpus=12, num_gpus_per_engine=12)))
    shifted = one_model(GroupSpec(num_gpus=2), GroupSpec(num_gpus=16, num_gpus_per_engine=16))
    assert "needs 8 devices of one node, 6 are available on node 0" in refusal(shifted)


def test_all_problems_are_told_together():
    groups = (GroupSpec(num_gpus=3, num_gpus_per_engine=2), GroupSpec(worker_type=WorkerType.DECODE, num_gpus=1))
    assert len(refusal(one_model(*groups, rollout_num_gpus=1)).splitlines()) == 4


groups = st.builds(
    GroupSpec,
    worker_type=st.sampled_from([WorkerType.REGULAR, WorkerType.PLACEHOLDER]),
    num_gpus=st.integers(1, 24),
    num_gpus_per_engine=st.sampled_from([None, 1, 2, 3, 4, 8, 16]),
)


@given(st.lists(groups, min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]), st.integers(0, 4))
def test_a_plan_gives_no_device_twice_and_an_engine_is_whole_on_its_nodes(groups, per_node, training):
    description = one_model(*groups, num_gpus_per_node=per_node, actor_num_gpus=training)
    try:
        layout = plan_layout(description)
    except InputError:
        return
    taken = [(share.node, device) for engine in layout.engines for share in engine.shares for device in share.devices]
    assert len(taken) == len(set(taken))
    assert all(node * per_node + device >= training for node, device in taken)
    for engine in layout.engines:
        assert engine.num_devices == (groups[engine.group].num_gpus_per_engine or 1)
        assert len(engine.shares) == max(1, engine.num_devices // per_node)
