"""Leases of devices: never two of one, numbers and holders in the errors, all back when a holder ends."""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from accel import AcceleratorError
from accel.placement.ledger import DeviceLedger

DEVICES = ("4", "5", "6", "7")


def ledger_with_a_node() -> DeviceLedger:
    ledger = DeviceLedger()
    ledger.register_node("MUSA", "n1", DEVICES)
    return ledger


def test_leases_are_disjoint_and_come_back():
    ledger = ledger_with_a_node()
    first, second = ledger.lease("MUSA", "n1", 2, "a"), ledger.lease("MUSA", "n1", 2, "b")
    assert (first.devices, second.devices) == (("4", "5"), ("6", "7"))
    ledger.release(first.lease_id)
    ledger.release(first.lease_id)
    assert ledger.lease("MUSA", "n1", 1, "c").devices == ("4",)
    assert ledger.release_holder("b") == [second]


def test_too_few_free_devices_names_numbers_and_holders():
    ledger = ledger_with_a_node()
    ledger.lease("MUSA", "n1", 3, "job-a")
    with pytest.raises(AcceleratorError, match=r"1 free MUSA devices of 4 and the job asks for 2 .*4 by job-a"):
        ledger.lease("MUSA", "n1", 2, "job-b")


def test_nodes_and_resources_are_apart():
    ledger = ledger_with_a_node()
    ledger.register_node("MUSA", "n2", DEVICES)
    assert ledger.lease("MUSA", "n1", 4, "a").devices == ledger.lease("MUSA", "n2", 4, "a").devices
    with pytest.raises(AcceleratorError, match="no registered ACME devices"):
        ledger.lease("ACME", "n1", 1, "a")


def test_a_node_keeps_its_list_while_devices_are_lent():
    ledger = ledger_with_a_node()
    ledger.register_node("MUSA", "n1", ("0", "1"))
    lease = ledger.lease("MUSA", "n1", 1, "a")
    ledger.register_node("MUSA", "n1", ("0", "1"))
    with pytest.raises(AcceleratorError, match="same visible list"):
        ledger.register_node("MUSA", "n1", ("0", "1", "2"))
    ledger.release(lease.lease_id)
    ledger.register_node("MUSA", "n1", ("0", "1", "2"))
    with pytest.raises(AcceleratorError, match="twice"):
        ledger.register_node("MUSA", "n1", ("0", "0"))


def test_a_new_ledger_takes_up_what_an_earlier_one_lent():
    lease = ledger_with_a_node().lease("MUSA", "n1", 2, "a")
    ledger = DeviceLedger()
    ledger.restore(lease)
    ledger.register_node("MUSA", "n1", DEVICES)
    assert ledger.lease("MUSA", "n1", 2, "b").devices == ("6", "7")
    with pytest.raises(AcceleratorError, match="held by z and by a"):
        ledger.restore(replace(lease, lease_id=9, holder="z"))


def test_a_request_that_comes_again_is_not_lent_twice():
    ledger = ledger_with_a_node()
    first = ledger.lease("MUSA", "n1", 2, "a", "request-1")
    assert ledger.lease("MUSA", "n1", 2, "a", "request-1") == first
    assert ledger.lease("MUSA", "n1", 1, "b", "request-1").devices == ("6",)
    assert ledger.lease("MUSA", "n1", 1, "a", "request-2").devices == ("7",)


def test_taking_up_twice_changes_nothing():
    lease = ledger_with_a_node().lease("MUSA", "n1", 2, "a")
    ledger = DeviceLedger()
    ledger.restore(lease)
    ledger.restore(lease)
    assert ledger.leases() == [lease]


class LedgerMachine(RuleBasedStateMachine):
    """Any order of leases, releases and deaths."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger_with_a_node()
        self.held: dict[int, tuple[str, tuple[str, ...]]] = {}

    @rule(amount=st.integers(1, 5), holder=st.sampled_from("abc"))
    def lease(self, amount, holder):
        free = len(DEVICES) - sum(len(devices) for _, devices in self.held.values())
        try:
            lease = self.ledger.lease("MUSA", "n1", amount, holder)
        except AcceleratorError:
            assert amount > free
        else:
            assert amount <= free
            self.held[lease.lease_id] = (holder, lease.devices)

    @rule(data=st.data())
    def release(self, data):
        if self.held:
            lease_id = data.draw(st.sampled_from(sorted(self.held)))
            self.ledger.release(lease_id)
            del self.held[lease_id]

    @rule(holder=st.sampled_from("abc"))
    def die(self, holder):
        self.ledger.release_holder(holder)
        self.held = {lease_id: held for lease_id, held in self.held.items() if held[0] != holder}

    @invariant()
    def no_device_is_lent_twice(self):
        lent = [device for _, devices in self.held.values() for device in devices]
        assert len(lent) == len(set(lent))
        assert {lease.lease_id: (lease.holder, lease.devices) for lease in self.ledger.leases()} == self.held


TestLedgerMachine = LedgerMachine.TestCase
