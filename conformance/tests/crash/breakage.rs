//! Lists the faults that the tests add to the store in a file.

/// A fault that can be added to the store in a file.
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

/// Each fault with the rule that it breaks and a case that must detect it.
pub(crate) const BROKEN: [(Breakage, &str, &str); 10] = [
    (Breakage::AcknowledgesEarly, "S3", "D01_acknowledged_writes"),
    (Breakage::ShowsEarly, "S4", "D04_nothing_seen_is_lost"),
    // After a partial commit, opening the store fails.
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
    /// Finds the fault with the given name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        BROKEN.iter().map(|(way, ..)| *way).chain([Self::Healthy]).find(|way| format!("{way:?}") == name)
    }
}
