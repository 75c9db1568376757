//! Filling a store from another store or a file. Each part is compared with the target first. So a walk can be broken
//! off at any moment and begun again, and another walk shows afterwards whether source and target are equal.

mod file;
mod source;
mod sum;
mod target;

pub(crate) use file::Plan;
pub(crate) use source::{Source, marked};
use sum::{PartSum, Sum};
use target::Before;
pub(crate) use target::Target;

use ipam_operator::moving::{Change, Tally, compare, ranges_between};
use kv::{Key, Value};

use crate::backup::{Stop, aside};
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
    /// Nothing is written: only keys and differences are counted. The documents were counted by the walk that wrote.
    Verify,
}

/// The findings and the work of a walk through source and target.
#[derive(Debug, Default)]
pub(crate) struct Walked {
    /// The contents of the source; with [`Work::Verify`] only the number of keys.
    pub(crate) tally: Tally,
    /// The checksums of all parts of the target after the walk, if it wrote.
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

impl Walked {
    /// Reads the target back. True if it still is as the walk left it.
    pub(crate) async fn is_there(&self, target: &mut Target<'_>) -> Result<bool> {
        target.has(&self.sums, &Progress::new("comparing", Some(self.tally.keys))).await
    }

    /// The number of keys that differ, or differed before the walk.
    pub(crate) fn differences(&self) -> u64 {
        self.missing + self.different + self.extra
    }

    /// The first keys that differ, one in each line.
    pub(crate) fn list(&self) -> String {
        let more = self.differences().saturating_sub(self.named.len() as u64);
        let mut list = self.named.iter().map(|line| format!("\n  {line}")).collect::<String>();
        if more > 0 {
            list.push_str(&format!("\n  and {more} more"));
        }
        list
    }

    /// Compares a part of the source, up to a key, with the target. Returns the writes and the target's former state.
    async fn part(
        &mut self,
        target: &Target<'_>,
        rows: Vec<(Key, Value)>,
        from: &Key,
        to: Option<&Key>,
        work: Work,
    ) -> Result<(Vec<Change>, Before), Stop> {
        let there = target.read(ranges_between(from, to)).await?;
        let before = if there.is_empty() { Before::Nothing } else { Before::Something };
        let (mut tally, mut sum, writes) =
            (std::mem::take(&mut self.tally), Sum::default(), matches!(work, Work::Fill | Work::Update));
        // Another thread compares, so that the next part is read meanwhile.
        let (tally, sum, found) = aside(move || {
            match work {
                Work::Verify => tally.keys += rows.len() as u64,
                Work::Fill | Work::Update | Work::DryRun => {
                    rows.iter().for_each(|(key, value)| tally.add(key, value.as_bytes()));
                }
            }
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
        self.count(&found.changes, ["new", "changed", "gone"]);
        match work {
            Work::DryRun | Work::Verify => Ok((Vec::new(), before)),
            Work::Fill if found.changes.iter().any(|change| change.was.is_set()) => Err(in_the_way(self)),
            Work::Fill | Work::Update => Ok((found.changes, before)),
        }
    }

    fn count(&mut self, changes: &[Change], words: [&str; 3]) {
        for change in changes {
            let (counter, word) = match (&change.value, change.was.is_set()) {
                (Some(_), false) => (&mut self.missing, words[0]),
                (Some(_), true) => (&mut self.different, words[1]),
                (None, _) => (&mut self.extra, words[2]),
            };
            *counter += 1;
            if self.named.len() < MOST_NAMED {
                let key = String::from_utf8_lossy(change.key.as_bytes()).into_owned();
                self.named.push(format!("{} ({word})", printable(&key)));
            }
        }
    }
}

/// Walks through source and target from the first key to the last. While one part is written, the next one is compared
/// and the one after that is read.
///
/// # Errors
/// With [`Work::Fill`], the target has a key that the source does not have, or has with another value.
pub(crate) async fn walk(
    source: &mut Source<'_>,
    target: &mut Target<'_>,
    work: Work,
    progress: &Progress,
) -> Result<Walked, Stop> {
    let mut walked = Walked::default();
    let (mut from, mut changes, mut before) = (Key::default(), Vec::new(), Before::Something);
    let mut part = source.next().await?;
    loop {
        let (rows, over) = part;
        let to = rows.last().filter(|_| !over).map(|(key, _)| key.successor());
        let next = async { if over { Ok((Vec::new(), true)) } else { source.next().await } };
        // A part without documents that is not the last one has no end, so there is nothing to compare.
        let compared = async {
            if to.is_none() && !over {
                return Ok((Vec::new(), Before::Something));
            }
            walked.part(target, rows, &from, to.as_ref(), work).await
        };
        let (next, compared, written) = futures::join!(next, compared, target.write(changes, before));
        written?;
        (changes, before) = compared?;
        progress.at(walked.tally.keys);
        if over {
            target.write(changes, before).await?;
            return Ok(walked);
        }
        part = next?;
        from = to.unwrap_or(from);
        target.give_way().await?;
    }
}

fn in_the_way(walked: &Walked) -> Stop {
    let list = walked.list();
    Failure::new(format!(
        "the store has keys that are other than in the file, or not in it; nothing was written over:{list}"
    ))
    .hint("somebody else has written to the store; --abort removes what it has, and then it can be filled anew")
    .into()
}
