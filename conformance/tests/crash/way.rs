//! What is wrong with a store.

/// A way to break a store in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Healthy,
    AcknowledgesEarly,
    ShowsEarly,
    RowByRow,
    OpByOp,
    SyncsNothing,
    ForgetsMark,
    GoesBack,
    LetsEverybodyIn,
    MakesItAnew,
    CallsItNotApplied,
}

/// Each broken way, the rule that it breaks and a case that has to notice.
pub(crate) const BROKEN: [(Way, &str, &str); 10] = [
    (Way::AcknowledgesEarly, "S3", "D01_acknowledged_writes"),
    (Way::ShowsEarly, "S4", "D04_nothing_seen_is_lost"),
    // Half of what it wrote does not open any more.
    (Way::RowByRow, "S3", "D02_acknowledged_txns"),
    (Way::OpByOp, "S5", "D03_prefix_of_many_writers"),
    (Way::SyncsNothing, "S3", "D09_synced_before_acknowledged"),
    (Way::ForgetsMark, "C5", "H14_mark_after_reopen"),
    (Way::GoesBack, "R8", "R11_deletion_compacted_and_killed"),
    (Way::LetsEverybodyIn, "E7", "M01_second_one_waits"),
    (Way::MakesItAnew, "E6", "D08_data_gone"),
    (Way::CallsItNotApplied, "E2", "D14_closed_under_writers"),
];

impl Way {
    /// The way of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        BROKEN.iter().map(|(way, ..)| *way).chain([Self::Healthy]).find(|way| format!("{way:?}") == name)
    }
}
