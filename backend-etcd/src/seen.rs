//! The newest state seen of a cluster, so that an answer from its past, or from another cluster, is noticed.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use etcd_client::ResponseHeader;
use kv::Revision;

/// The cluster that answers, and the newest revision that any answer named.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    cluster: AtomicU64,
    revision: AtomicI64,
}

/// How fresh an answer has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// At least as new as everything that was seen before the call began.
    SinceCall,
    /// As the member that answered is: a watch may begin on one that is behind.
    OfMember,
}

impl Seen {
    /// The cluster, once it has answered.
    pub(crate) fn cluster(&self) -> Option<u64> {
        Some(self.cluster.load(Ordering::SeqCst)).filter(|cluster| *cluster != 0)
    }

    /// The newest revision so far.
    pub(crate) fn revision(&self) -> Revision {
        Revision::new(self.revision.load(Ordering::SeqCst))
    }

    /// Something of this revision was seen.
    pub(crate) fn note(&self, revision: Revision) {
        self.revision.fetch_max(revision.get(), Ordering::SeqCst);
    }

    /// Judges an answer to a call that began when `before` was the newest revision, and takes note of it.
    ///
    /// # Errors
    /// The fault of the answer, in words.
    pub(crate) fn judge(&self, header: &ResponseHeader, before: Revision, freshness: Freshness) -> Result<(), String> {
        self.judge_numbers(header.cluster_id(), Revision::new(header.revision()), before, freshness)
    }

    fn judge_numbers(
        &self,
        cluster: u64,
        revision: Revision,
        before: Revision,
        freshness: Freshness,
    ) -> Result<(), String> {
        let known = self.cluster.compare_exchange(0, cluster, Ordering::SeqCst, Ordering::SeqCst);
        match known {
            Err(known) if known != cluster => {
                return Err(format!("cluster {cluster:x} answers where cluster {known:x} did before"));
            }
            _ => {}
        }
        if freshness == Freshness::SinceCall {
            if revision < before {
                return Err(format!("revision {revision} after revision {before} had been seen"));
            }
            self.note(revision);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_past_and_strangers_are_noticed() {
        let seen = Seen::default();
        assert_eq!(seen.cluster(), None);
        let judge = |cluster, revision, freshness| {
            seen.judge_numbers(cluster, Revision::new(revision), seen.revision(), freshness)
        };
        assert_eq!(judge(7, 5, Freshness::SinceCall), Ok(()));
        assert_eq!(judge(7, 5, Freshness::SinceCall), Ok(()));
        assert!(judge(7, 4, Freshness::SinceCall).unwrap_err().contains("revision 4"));
        assert_eq!(judge(7, 4, Freshness::OfMember), Ok(()));
        assert!(judge(8, 9, Freshness::SinceCall).unwrap_err().contains("cluster 8"));
        assert!(judge(8, 9, Freshness::OfMember).is_err());
        assert_eq!(seen.cluster(), Some(7));
        seen.note(Revision::new(9));
        assert!(judge(7, 8, Freshness::SinceCall).is_err());
    }

    #[test]
    fn calls_that_overlap_may_answer_in_any_order() {
        let seen = Seen::default();
        let early = seen.revision();
        assert_eq!(seen.judge_numbers(7, Revision::new(10), early, Freshness::SinceCall), Ok(()));
        assert_eq!(seen.judge_numbers(7, Revision::new(9), early, Freshness::SinceCall), Ok(()));
        assert_eq!(seen.revision(), Revision::new(10));
    }
}
