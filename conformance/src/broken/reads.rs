//! Defines stores with faults in reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use kv::{Content, Key, Range, RangeRequest, RangeResponse, Result, Revision, Store};

use super::Twist;

#[derive(Debug, Default)]
pub(super) struct StaleReads(AtomicU64);

#[async_trait]
impl Twist for StaleReads {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        let now = inner.range(request.clone()).await?;
        if request.at.is_set() || !self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(5) {
            return Ok(now);
        }
        let before = Revision::new(now.revision.get() - 1);
        match inner.range(request.with_at(before)).await {
            Ok(old) => Ok(RangeResponse { revision: before, ..old }),
            Err(_) => Ok(now),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct TornReads;

#[async_trait]
impl Twist for TornReads {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        if request != RangeRequest::new(Range::All) {
            return inner.range(request).await;
        }
        let half = |range| RangeRequest::new(range);
        let mut found = inner.range(half(Range::FromTo(Key::default(), Key::from("m")))).await?;
        tokio::time::sleep(Duration::from_millis(1)).await;
        let rest = inner.range(half(Range::From(Key::from("m")))).await?;
        found.kvs.extend(rest.kvs);
        found.count += rest.count;
        found.revision = rest.revision;
        Ok(found)
    }
}

#[derive(Debug, Default)]
pub(super) struct ForgetsCompaction;

#[async_trait]
impl Twist for ForgetsCompaction {
    async fn compact(&self, _: &dyn Store, _: Revision) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug, Default)]
pub(super) struct IgnoresRevision;

#[async_trait]
impl Twist for IgnoresRevision {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        inner.range(request.clone()).await?;
        inner.range(request.with_at(Revision::UNSET)).await
    }
}

#[derive(Debug, Default)]
pub(super) struct OldHeader;

#[async_trait]
impl Twist for OldHeader {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        let at = request.at;
        let found = inner.range(request).await?;
        Ok(if at.is_set() { RangeResponse { revision: at, ..found } } else { found })
    }
}

#[derive(Debug, Default)]
pub(super) struct LeaksValues;

#[async_trait]
impl Twist for LeaksValues {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        let content = if request.content == Content::KeysOnly { Content::Full } else { request.content };
        inner.range(request.with_content(content)).await
    }
}

#[derive(Debug, Default)]
pub(super) struct NegativeLimit;

#[async_trait]
impl Twist for NegativeLimit {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        let limit = request.limit.wrapping_abs();
        inner.range(request.with_limit(limit)).await
    }
}

#[derive(Debug, Default)]
pub(super) struct CountsThePage;

#[async_trait]
impl Twist for CountsThePage {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        let counting = request.content == Content::CountOnly;
        let found = inner.range(request).await?;
        Ok(if counting { found } else { RangeResponse { count: found.kvs.len() as u64, ..found } })
    }
}

#[derive(Debug, Default)]
pub(super) struct NaivePrefixEnd;

#[async_trait]
impl Twist for NaivePrefixEnd {
    async fn range(&self, inner: &dyn Store, mut request: RangeRequest) -> Result<RangeResponse> {
        if let Range::Prefix(prefix) = &request.range
            && let Some((last, rest)) = prefix.as_bytes().split_last()
        {
            let end = [rest, &[last.wrapping_add(1)]].concat();
            request.range = Range::FromTo(prefix.clone(), Key::new(end));
        }
        inner.range(request).await
    }
}
