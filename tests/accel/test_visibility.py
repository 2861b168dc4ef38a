"""Physical ids and local indices under a visible-devices list: the reported cases, and properties over any list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel import AcceleratorError
from accel.backends.cuda import CudaAccelerator, RocmAccelerator
from accel.backends.musa import MusaAccelerator
from accel.masks import VisibleDevices, mask_problems
from accel.visibility import physical_device_id, resolve_visible_device_id

CUDA, MUSA = CudaAccelerator(), MusaAccelerator()

# (variable's value, what was handed out, local index)
RESOLVED = [
    pytest.param("4,5,6,7", 6, 2, id="slime 111, slime 1326: the list does not start at 0"),
    pytest.param("4-7", 5, 1, id="verl 7507: a range, with Ray's own isolation off"),
    ("4-7", 5.0, 1),
    pytest.param("GPU-5b1e-07, GPU-77aa-12", "GPU-77aa-12", 1, id="vllm 41848: UUIDs of cards"),
    pytest.param("MIG-0b45-1,MIG-0b45-2", "MIG-0b45-2", 1, id="vllm 13815: UUIDs of parts of cards"),
    ("GPU-5b1e-07,GPU-77aa-12", 1, 1),  # a number against UUIDs is a local index
    ("0,1,2,3", "0.0", 0),
    ("0,1,2,3", 2.0, 2),
    (" 3 , 1 ", "1", 1),
    ("3,3,1", 1, 1),  # duplicates: the first counts
    ("1,0", 0, 1),  # both a physical and a local id: physical
    ("4,5", 1, 1),  # only a local one
    ("0,,1", 1, 1),
    (" 1 ", 1, 0),
    (None, 3, 3),  # not set: nothing is renumbered
    ("0,1,-1,2", 1, 1),
]


@pytest.mark.parametrize(("value", "device", "local"), RESOLVED)
def test_reported_cases(monkeypatch, value, device, local):
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert resolve_visible_device_id(device, CUDA) == local


@pytest.mark.parametrize(
    ("value", "device", "says"),
    [
        ("4,5", 6, r"'6' is not among CUDA_VISIBLE_DEVICES='4,5'.*valid are 4, 5, or local indices 0 to 1"),
        ("", 0, "no device is visible"),
        ("-1", 0, "no device is visible"),
        ("GPU-aa", "GPU-ab", "GPU-ab"),
        ("0,1", 0.5, "no device id"),
        ("0,1", True, "no device id"),
        ("0,1", -1, "no device id"),
        ("0,1", float("nan"), "no device id"),
        ("0,x!y", 0, r"CUDA_VISIBLE_DEVICES='0,x!y': 'x!y' is no device id"),
        ("7-4", 4, "7-4"),
        ("0-999999999", 4, "1000000000 devices; most are 4096"),
        ("0-" + "9" * 5000, 4, "no device id"),
        ("9" * 5000, 4, "no device id"),
        ("٣", 3, "no device id"),  # a digit, but none that a driver reads
        ("all", 0, "'all' is no device id"),  # NVIDIA_VISIBLE_DEVICES has such words, which the drivers do not know
        ("0,None", 0, "'None' is no device id"),
        (",", 0, "no device is visible"),
        ("NoDevFiles", 0, "no device is visible"),
        (None, "GPU-aa", "CUDA_VISIBLE_DEVICES is not set"),
    ],
)
def test_what_cannot_be_resolved_names_the_list(monkeypatch, value, device, says):
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(AcceleratorError, match=says):
        resolve_visible_device_id(device, CUDA)


def test_one_visible_device_and_a_job_that_asks_for_more_is_an_error_with_both_numbers(monkeypatch):
    """slime 10."""
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(MusaAccelerator, "device_count", lambda self: 1)
    with pytest.raises(AcceleratorError, match=r"no device 1: this process sees 1.*MUSA_VISIBLE_DEVICES=3"):
        MUSA.set_device(1)


def test_a_named_backend_resolves_without_its_hardware(monkeypatch):
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert resolve_visible_device_id(7, "musa") == 1
    assert physical_device_id(0, "musa") == "6"
    assert physical_device_id(0, "cuda") == "0"


def test_contradictory_masks_are_found():
    assert mask_problems(CUDA, {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"})
    assert mask_problems(RocmAccelerator(), {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"})
    assert not mask_problems(RocmAccelerator(), {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0-1"})
    assert mask_problems(MUSA, {"MUSA_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert not mask_problems(MUSA, {"MUSA_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": ""})
    assert not mask_problems(CUDA, {"ROCR_VISIBLE_DEVICES": "1"})


@pytest.mark.parametrize("own", [{}, {"HIP_VISIBLE_DEVICES": ""}], ids=["unset", "empty"])
def test_rocm_reads_cudas_list_where_its_own_is_not_there(monkeypatch, own):
    """The HIP runtime does, so ids handed out are of that list, and masks below it contradict it."""
    rocm = RocmAccelerator()
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**own, "CUDA_VISIBLE_DEVICES": "4,5"}.items():
        monkeypatch.setenv(name, value)
    assert resolve_visible_device_id(5, rocm) == 1
    with pytest.raises(AcceleratorError, match="not among CUDA_VISIBLE_DEVICES='4,5'"):
        resolve_visible_device_id(7, rocm)
    assert not mask_problems(rocm)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5")
    (problem,) = mask_problems(rocm)
    assert "CUDA_VISIBLE_DEVICES=4,5 and ROCR_VISIBLE_DEVICES=4,5 are both set" in problem


def test_rocms_own_list_counts_before_cudas(monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert resolve_visible_device_id(6, RocmAccelerator()) == 0


@pytest.mark.parametrize(
    ("accelerator", "environ", "contradicts"),
    [
        (CUDA, {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "1"}, False),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": " "}, False),
        (RocmAccelerator(), {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": ""}, False),
        (RocmAccelerator(), {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}, True),
        (RocmAccelerator(), {"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "0"}, True),
        (MUSA, {"MUSA_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0,1"}, True),  # none, or two
        (MUSA, {"MUSA_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}, False),
        (MUSA, {"MUSA_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, False),
        (MUSA, {"CUDA_VISIBLE_DEVICES": "0,1"}, False),
    ],
)
def test_empty_masks_and_masks_that_say_none(accelerator, environ, contradicts):
    assert bool(mask_problems(accelerator, environ)) is contradicts


numbers = st.integers(0, 99).map(str)
uuids = st.from_regex(r"(GPU|MIG)-[0-9a-f]{4}(-[0-9a-f]{4}){0,3}", fullmatch=True)
spaces = st.sampled_from(["", " ", "\t"])
ids = st.lists(st.one_of(numbers, uuids), min_size=1, max_size=16)


@given(ids, spaces)
def test_every_listed_id_resolves_to_its_first_place_and_back(listed, space):
    parsed = VisibleDevices.parse("V", f",{space}".join(listed))
    unique = list(dict.fromkeys(listed))
    assert list(parsed.ids) == unique
    for place, device in enumerate(unique):
        assert parsed.local_index(device) == place
        assert parsed.physical_id(place) == device


@given(ids, st.integers(0, 200))
def test_a_number_is_physical_if_listed_else_local_if_in_range_else_refused(listed, number):
    parsed = VisibleDevices.parse("V", ",".join(listed))
    if str(number) in parsed.ids:
        assert parsed.local_index(str(number)) == parsed.ids.index(str(number))
    elif number < len(parsed.ids):
        assert parsed.local_index(str(number)) == number
    else:
        with pytest.raises(AcceleratorError, match="V="):
            parsed.local_index(str(number))


@given(st.integers(0, 50), st.integers(0, 20))
def test_a_range_is_its_numbers(first, extra):
    spelled = ",".join(str(number) for number in range(first, first + extra + 1))
    assert VisibleDevices.parse("V", f"{first}-{first + extra}") == VisibleDevices.parse("V", spelled)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused_in_words(text):
    message = None
    try:
        ids = VisibleDevices.parse("V", text).ids
        assert len(set(ids)) == len(ids)
    except AcceleratorError as error:
        message = str(error)
    assert message is None or message.startswith("V=")
