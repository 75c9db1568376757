//! The steps on a read's answer that etcd has and a store has not: revision filters, orders, and a limit after both.

use std::cmp::Ordering;

use etcd_client::proto::{PbKeyValue, PbRangeRequest, PbRangeResponse, PbResponseHeader};
use kv::{Content, Kv, RangeResponse};

use crate::convert::key_value;

/// The order of an answer: `SortOrder` and `SortTarget` of etcd's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Ascending,
    Descending,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Key,
    Version,
    Create,
    Mod,
    Value,
}

/// How the answer of a read looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    limit: i64,
    keys_only: bool,
    count_only: bool,
    sort: Option<(By, Order)>,
    mod_revisions: (i64, i64),
    create_revisions: (i64, i64),
}

impl Shape {
    /// The shape that a request wants.
    pub(crate) fn of(request: &PbRangeRequest) -> Self {
        let by = match request.sort_target {
            1 => By::Version,
            2 => By::Create,
            3 => By::Mod,
            4 => By::Value,
            _ => By::Key,
        };
        let sort = match (request.sort_order, by) {
            // As a store gives them.
            (0 | 1, By::Key) => None,
            (2, by) => Some((by, Order::Descending)),
            // Without an order, another target than the key sorts ascending.
            (_, by) => Some((by, Order::Ascending)),
        };
        Self {
            limit: request.limit,
            keys_only: request.keys_only,
            count_only: request.count_only,
            sort,
            mod_revisions: (request.min_mod_revision, request.max_mod_revision),
            create_revisions: (request.min_create_revision, request.max_create_revision),
        }
    }

    /// True if the store's own answer is what is wanted.
    fn is_plain(&self) -> bool {
        self.sort.is_none() && self.mod_revisions == (0, 0) && self.create_revisions == (0, 0)
    }

    /// The limit that the store gets: none if the answer is worked on afterwards.
    pub(crate) fn limit_of_store(&self) -> i64 {
        if self.is_plain() { self.limit } else { 0 }
    }

    /// The content that the store brings of each key.
    pub(crate) fn content_of_store(&self) -> Content {
        let sorts_by_value = matches!(self.sort, Some((By::Value, _)));
        match (self.count_only, self.keys_only) {
            (true, _) => Content::CountOnly,
            (_, true) if !sorts_by_value => Content::KeysOnly,
            _ => Content::Full,
        }
    }

    /// The answer as it is sent. `count` is that of the range, whatever was filtered.
    pub(crate) fn answer(&self, found: RangeResponse, header: Option<PbResponseHeader>) -> PbRangeResponse {
        let RangeResponse { mut kvs, count, mut more, .. } = found;
        if !self.is_plain() {
            kvs.retain(|kv| self.wants(kv));
            if let Some((by, order)) = self.sort {
                kvs.sort_by(|one, other| ordered(by, order, one, other));
            }
            let limit = usize::try_from(self.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
            more = kvs.len() > limit;
            kvs.truncate(limit);
        }
        let bare = |mut kv: PbKeyValue| {
            if self.keys_only {
                kv.value = Vec::new();
            }
            kv
        };
        PbRangeResponse {
            header,
            kvs: kvs.into_iter().map(|kv| bare(key_value(kv))).collect(),
            more,
            count: i64::try_from(count).unwrap_or(i64::MAX),
        }
    }

    fn wants(&self, kv: &Kv) -> bool {
        // 0 is no bound.
        let within =
            |revision: i64, (from, to): (i64, i64)| (from == 0 || revision >= from) && (to == 0 || revision <= to);
        within(kv.mod_revision.get(), self.mod_revisions) && within(kv.create_revision.get(), self.create_revisions)
    }
}

fn ordered(by: By, order: Order, one: &Kv, other: &Kv) -> Ordering {
    let ascending = match by {
        By::Key => one.key.cmp(&other.key),
        By::Version => one.version.cmp(&other.version),
        By::Create => one.create_revision.cmp(&other.create_revision),
        By::Mod => one.mod_revision.cmp(&other.mod_revision),
        By::Value => one.value.cmp(&other.value),
    };
    match order {
        Order::Ascending => ascending,
        Order::Descending => ascending.reverse(),
    }
}
