"""When a reader's lease covers a read, and when it has to be renewed."""

from baton.kv_transfer.handoff import ReaderLease


def test_a_renewal_proves_nothing_until_it_is_confirmed() -> None:
    lease = ReaderLease(now_s=0.0, lease_s=30.0)
    lease.renewed(5.0)
    assert not lease.covers(6.0)
    assert lease.may_cover(6.0)
    assert lease.confirmed()
    assert lease.covers(35.0)
    assert not lease.covers(35.1)


def test_confirmations_belong_to_the_oldest_renewals() -> None:
    lease = ReaderLease(now_s=0.0, lease_s=30.0)
    lease.renewed(1.0)
    lease.renewed(11.0)
    lease.confirmed()
    assert lease.limit_s == 31.0
    lease.confirmed()
    assert lease.limit_s == 41.0
    assert not lease.confirmed()


def test_renewals_are_due_at_a_third_of_the_lease() -> None:
    lease = ReaderLease(now_s=3.0, lease_s=30.0)
    assert lease.renew_at_s == 13.0
    lease.renewed(14.0)
    assert lease.renew_at_s == 24.0


def test_a_source_that_confirms_nothing_is_given_up_after_one_lease() -> None:
    lease = ReaderLease(now_s=3.0, lease_s=30.0)
    lease.renewed(13.0)
    assert lease.limit_s == 33.0
