//! Lists the faults that the tests inject into the file-based store.

/// A fault that can be injected into the file-based store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Breakage {
    Healthy,
    AcknowledgesEarly,
    ShowsEarly,
    RowByRow,
    OpByOp,
    SyncsNothing,
    ForgetsMark,
    GoesBack,
    SkipsLock,
    MakesItAnew,
    CallsItNotApplied,
}

/// Each fault, with the rule that it breaks and a test case that must detect it.
pub(crate) const BROKEN: [(Breakage, &str, &str); 10] = [
    (Breakage::AcknowledgesEarly, "S3", "D01_acknowledged_writes"),
    (Breakage::ShowsEarly, "S4", "D04_nothing_seen_is_lost"),
    // Fault `RowByRow`: a commit that was written only in part makes opening the store fail.
    (Breakage::RowByRow, "S3", "D02_acknowledged_txns"),
    (Breakage::OpByOp, "S5", "D03_prefix_of_many_writers"),
    (Breakage::SyncsNothing, "S3", "D09_synced_before_acknowledged"),
    (Breakage::ForgetsMark, "C5", "H14_mark_after_reopen"),
    (Breakage::GoesBack, "R8", "R11_deletion_compacted_and_killed"),
    (Breakage::SkipsLock, "E7", "M01_second_one_waits"),
    (Breakage::MakesItAnew, "E6", "D08_data_gone"),
    (Breakage::CallsItNotApplied, "E2", "D14_closed_under_writers"),
];

impl Breakage {
    pub(crate) fn named(name: &str) -> Option<Self> {
        BROKEN.iter().map(|(way, ..)| *way).chain([Self::Healthy]).find(|way| format!("{way:?}") == name)
    }
}
