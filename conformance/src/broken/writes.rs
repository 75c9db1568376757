//! Defines stores with faults in writes.

use async_trait::async_trait;
use kv::{
    CompareOp, Content, Key, MAX_TXN_OPS, Op, Range, RangeRequest, Result, Revision, Store, StoreExt, Target, Txn,
    TxnResponse,
};

use super::Twist;

#[derive(Debug, Default)]
pub(super) struct IgnoresCompares;

#[async_trait]
impl Twist for IgnoresCompares {
    async fn txn(&self, inner: &dyn Store, mut txn: Txn) -> Result<TxnResponse> {
        txn.check("broken")?;
        txn.compares.clear();
        inner.txn(txn).await
    }
}

#[derive(Debug, Default)]
pub(super) struct ValueOfAbsentKey;

#[async_trait]
impl Twist for ValueOfAbsentKey {
    async fn txn(&self, inner: &dyn Store, mut txn: Txn) -> Result<TxnResponse> {
        let mut kept = Vec::new();
        for compare in txn.compares {
            let different = compare.op == CompareOp::NotEqual && matches!(compare.target, Target::Value(_));
            if !different || inner.count(compare.range.clone()).await? > 0 {
                kept.push(compare);
            }
        }
        txn.compares = kept;
        inner.txn(txn).await
    }
}

#[derive(Debug, Default)]
pub(super) struct OpByOp;

#[async_trait]
impl Twist for OpByOp {
    async fn txn(&self, inner: &dyn Store, mut txn: Txn) -> Result<TxnResponse> {
        txn.check("broken")?;
        if txn.success.len() < 2 {
            return inner.txn(txn).await;
        }
        let rest = txn.success.split_off(1);
        let mut answer = inner.txn(txn).await?;
        if answer.succeeded {
            for op in rest {
                let next = inner.txn(Txn::new().with_success([op])).await?;
                answer.revision = next.revision;
                answer.results.extend(next.results);
            }
        }
        Ok(answer)
    }
}

#[derive(Debug, Default)]
pub(super) struct LastPutWins;

#[async_trait]
impl Twist for LastPutWins {
    async fn txn(&self, inner: &dyn Store, mut txn: Txn) -> Result<TxnResponse> {
        for branch in [&mut txn.success, &mut txn.failure] {
            let keys: Vec<Option<Key>> = branch.iter().map(put_key).collect();
            let mut at = 0;
            branch.retain(|_| {
                at += 1;
                keys.get(at - 1).is_none_or(|key| key.is_none() || !keys[at..].contains(key))
            });
        }
        inner.txn(txn).await
    }
}

fn put_key(op: &Op) -> Option<Key> {
    if let Op::Put { key, .. } = op { Some(key.clone()) } else { None }
}

#[derive(Debug, Default)]
pub(super) struct CountsNothing;

#[async_trait]
impl Twist for CountsNothing {
    async fn txn(&self, inner: &dyn Store, txn: Txn) -> Result<TxnResponse> {
        let deletes = txn.success.iter().any(|op| matches!(op, Op::Delete { .. }));
        let before = revision(inner).await?;
        let mut answer = inner.txn(txn).await?;
        if deletes && answer.revision == before {
            answer.revision = inner.put(&b"\xff\xff\xff hidden"[..], "").await?;
        }
        Ok(answer)
    }
}

async fn revision(inner: &dyn Store) -> Result<Revision> {
    Ok(inner.range(RangeRequest::new(Range::key("?")).with_content(Content::CountOnly)).await?.revision)
}

#[derive(Debug, Default)]
pub(super) struct SkipsIdentical;

#[async_trait]
impl Twist for SkipsIdentical {
    async fn txn(&self, inner: &dyn Store, mut txn: Txn) -> Result<TxnResponse> {
        if let [Op::Put { key, value, .. }] = &txn.success[..]
            && txn.compares.is_empty()
            && !key.is_empty()
            && inner.get(key.clone()).await.is_ok_and(|kv| kv.is_some_and(|kv| kv.value == *value))
        {
            txn.success.clear();
        }
        inner.txn(txn).await
    }
}

#[derive(Debug, Default)]
pub(super) struct CutsLargeTxns;

#[async_trait]
impl Twist for CutsLargeTxns {
    async fn txn(&self, inner: &dyn Store, mut txn: Txn) -> Result<TxnResponse> {
        txn.success.truncate(MAX_TXN_OPS);
        inner.txn(txn).await
    }
}
