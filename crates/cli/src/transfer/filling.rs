//! Filling a store from a source. Each part is compared with the store first. So the filling can be broken off at any
//! moment and begun again, and another comparison shows afterwards whether source and store are equal.

use ipam_operator::moving::{Change, Tally, compare, ranges_between};
use kv::Key;

use super::sum::{PartSum, Sum};
use super::target::Before;
use super::{Header, Part, Row, Sink, Source, Stop, Target, aside, pump};
use crate::error::{Failure, Result};
use crate::output::{Progress, printable};

/// The most keys with differences that are named.
const MOST_NAMED: usize = 10;

/// The treatment of differences between source and target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Missing keys are written; any other difference is an error.
    Fill,
    /// The target becomes equal to the source.
    Update,
    /// Nothing is written: documents and differences are counted.
    DryRun,
    /// Nothing is written: only keys and differences are counted. The documents were counted when they were written.
    Verify,
}

/// The findings of a comparison of source and target, from the first key to the last.
#[derive(Debug, Default)]
pub(crate) struct Differences {
    /// The contents of the source; with [`Work::Verify`] only the number of keys.
    pub(crate) tally: Tally,
    /// The checksums of all parts of the target after the comparison, if it wrote.
    sums: Vec<PartSum>,
    /// Keys that were missing in the target.
    pub(crate) missing: u64,
    /// Keys that had another value.
    pub(crate) different: u64,
    /// Keys that the source does not have.
    pub(crate) extra: u64,
    /// Keys of the target's own, which stay.
    pub(crate) kept: u64,
    /// The first keys that differ, each with the kind of difference.
    named: Vec<String>,
}

impl Differences {
    /// Reads the target back. True if it still is as it was left.
    pub(crate) async fn is_there(&self, target: &mut Target<'_>) -> Result<bool> {
        target.has(&self.sums, &Progress::new("comparing", Some(self.tally.keys))).await
    }

    /// The number of keys that differ, or differed before they were written.
    pub(crate) fn total(&self) -> u64 {
        self.missing + self.different + self.extra
    }

    /// The first keys that differ, one in each line.
    pub(crate) fn list(&self) -> String {
        let more = self.total().saturating_sub(self.named.len() as u64);
        let mut list = self.named.iter().map(|line| format!("\n  {line}")).collect::<String>();
        if more > 0 {
            list.push_str(&format!("\n  and {more} more"));
        }
        list
    }

    fn count(&mut self, changes: &[Change]) {
        for change in changes {
            let (counter, word) = match (&change.value, change.was.is_set()) {
                (Some(_), false) => (&mut self.missing, "new"),
                (Some(_), true) => (&mut self.different, "changed"),
                (None, _) => (&mut self.extra, "gone"),
            };
            *counter += 1;
            if self.named.len() < MOST_NAMED {
                let key = String::from_utf8_lossy(change.key.as_bytes()).into_owned();
                self.named.push(format!("{} ({word})", printable(&key)));
            }
        }
    }
}

/// The filling of a store, or its comparison with a source.
pub(crate) struct Filling<'f, 'l> {
    target: &'f mut Target<'l>,
    work: Work,
    progress: Progress,
    /// The first key of the next part.
    from: Key,
    /// The changes to the last part, which are written while the next one is compared.
    pending: Option<(Vec<Change>, Before)>,
    found: Differences,
}

impl<'f, 'l> Filling<'f, 'l> {
    /// Fills or compares the target. `keys` is the number of keys in the source, if it is known.
    ///
    /// # Errors
    /// With [`Work::Fill`], the target has a key that the source does not have, or has with another value.
    pub(crate) async fn run(
        source: &mut Source<'_>,
        target: &'f mut Target<'l>,
        work: Work,
        keys: Option<u64>,
    ) -> Result<Differences, Stop> {
        let what = match work {
            Work::Fill => "writing",
            Work::Update => "copying",
            Work::DryRun | Work::Verify => "comparing",
        };
        let mut filling = Self {
            target,
            work,
            progress: Progress::new(what, keys),
            from: Key::default(),
            pending: None,
            found: Differences::default(),
        };
        pump(source, &mut filling).await?;
        Ok(filling.found)
    }
}

impl Sink for Filling<'_, '_> {
    async fn begin(&mut self, _header: Header) -> Result<()> {
        Ok(())
    }

    async fn take(&mut self, part: Part) -> Result<()> {
        let to = part.rows.last().filter(|_| !part.is_last).map(|row| row.key.successor());
        let (changes, before) = self.pending.take().unwrap_or_default();
        let target = &*self.target;
        // A part without rows that is not the last one has no end, so there is nothing to compare.
        let compared = async {
            if to.is_none() && !part.is_last {
                return Ok(Default::default());
            }
            self.found.part(target, part.rows, &self.from, to.as_ref(), self.work).await
        };
        let (compared, written) = futures::join!(compared, target.write(changes, before));
        written?;
        self.pending = Some(compared?);
        self.progress.at(self.found.tally.keys);
        if part.is_last {
            let (changes, before) = self.pending.take().unwrap_or_default();
            return self.target.write(changes, before).await;
        }
        self.from = to.unwrap_or(std::mem::take(&mut self.from));
        self.target.give_way().await
    }
}

impl Differences {
    /// Compares a part of the source, up to a key, with the target. Returns the writes and the target's former state.
    async fn part(
        &mut self,
        target: &Target<'_>,
        rows: Vec<Row>,
        from: &Key,
        to: Option<&Key>,
        work: Work,
    ) -> Result<(Vec<Change>, Before)> {
        let there = target.read(ranges_between(from, to)).await?;
        let before = if there.is_empty() { Before::Nothing } else { Before::Something };
        let (mut tally, mut sum, writes) =
            (std::mem::take(&mut self.tally), Sum::default(), matches!(work, Work::Fill | Work::Update));
        // Another thread compares, so that the next part is read meanwhile.
        let (tally, sum, found) = aside(move || {
            match work {
                Work::Verify => tally.keys += rows.len() as u64,
                Work::Fill | Work::Update | Work::DryRun => {
                    rows.iter().for_each(|row| tally.add(&row.key, row.value.as_bytes()));
                }
            }
            let rows = rows.into_iter().map(|row| (row.key, row.value)).collect();
            let found = compare(rows, there, |key, value| {
                if writes {
                    sum.add(key, value);
                }
            });
            Ok((tally, sum, found))
        })
        .await?;
        self.tally = tally;
        if writes {
            self.sums.push(PartSum { from: from.clone(), to: to.cloned(), sum });
        }
        self.kept += found.kept;
        self.count(&found.changes);
        match work {
            Work::DryRun | Work::Verify => Ok((Vec::new(), before)),
            Work::Fill if found.changes.iter().any(|change| change.was.is_set()) => Err(in_the_way(self)),
            Work::Fill | Work::Update => Ok((found.changes, before)),
        }
    }
}

fn in_the_way(found: &Differences) -> Failure {
    let list = found.list();
    Failure::new(format!(
        "the store has keys that are other than in the file, or not in it; nothing was written over:{list}"
    ))
    .hint("somebody else has written to the store; --abort removes what it has, and then it can be filled anew")
}
