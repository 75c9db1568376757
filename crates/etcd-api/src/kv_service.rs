//! Implements the service KV.

use std::pin::Pin;

use async_trait::async_trait;
use etcd_client::proto::{
    PbCompactionRequest, PbCompactionResponse, PbDeleteRequest, PbDeleteResponse, PbKvService, PbPutRequest,
    PbPutResponse, PbRangeRequest, PbRangeResponse, PbRangeStreamResponse, PbResponseOp, PbTxnOpResponse, PbTxnRequest,
    PbTxnResponse,
};
use futures::Stream;
use kv::{Compare, LeaseId, Op, OpResult, RangeRequest, Revision, Txn};
use tonic::{Request, Response, Status};

use crate::Api;
use crate::convert::{self, ReadShape, Refusal, TranslatedTxn, status, unsupported};

/// Maximum number of attempts of a put that keeps the stored value or lease. An attempt to put fails if another writer
/// changes the key between the attempt's read and its write.
const ATTEMPTS: usize = 16;

#[async_trait]
impl PbKvService for Api {
    type RangeStreamStream = Pin<Box<dyn Stream<Item = Result<PbRangeStreamResponse, Status>> + Send>>;

    async fn range(&self, request: Request<PbRangeRequest>) -> Result<Response<PbRangeResponse>, Status> {
        let request = request.into_inner();
        let shape = ReadShape::of(&request);
        let past = request.revision;
        let read = RangeRequest::new(convert::range(request.key, request.range_end)?)
            .with_at(Revision::new(request.revision))
            .with_limit(shape.limit_of_store())
            .with_content(shape.content_of_store());
        let found = self.backing.store().range(read).await.map_err(|error| status(&error))?;
        // The store's oldest revision is checked after the read, because the read opens the store.
        self.check_past(past)?;
        let header = self.header(found.revision);
        Ok(Response::new(shape.answer(found, header)))
    }

    async fn range_stream(&self, _: Request<PbRangeRequest>) -> Result<Response<Self::RangeStreamStream>, Status> {
        Err(unsupported("RangeStream"))
    }

    async fn put(&self, request: Request<PbPutRequest>) -> Result<Response<PbPutResponse>, Status> {
        let put = request.into_inner();
        if put.ignore_value && !put.value.is_empty() {
            return Err(Refusal::ValueProvided.into());
        }
        if put.ignore_lease && put.lease != 0 {
            return Err(Refusal::LeaseProvided.into());
        }
        let answer = match put.ignore_value || put.ignore_lease {
            true => self.put_what_is_there(put).await?,
            false => self.txn_of(Txn::new().with_success([convert::put_of(put)?])).await?,
        };
        let prev_kv = match answer.results.into_iter().next() {
            Some(OpResult::Put { prev }) => prev.map(convert::key_value),
            _ => None,
        };
        Ok(Response::new(PbPutResponse { header: self.header(answer.revision), prev_kv }))
    }

    async fn delete_range(&self, request: Request<PbDeleteRequest>) -> Result<Response<PbDeleteResponse>, Status> {
        let op = convert::delete_op(request.into_inner())?;
        let answer = self.txn_of(Txn::new().with_success([op])).await?;
        let header = self.header(answer.revision);
        Ok(Response::new(match answer.results.into_iter().next() {
            Some(OpResult::Delete { count, prevs }) => PbDeleteResponse { header, ..deleted(count, prevs) },
            _ => PbDeleteResponse { header, ..PbDeleteResponse::default() },
        }))
    }

    async fn txn(&self, request: Request<PbTxnRequest>) -> Result<Response<PbTxnResponse>, Status> {
        let TranslatedTxn { txn, success, failure } = convert::txn(request.into_inner())?;
        let answer = self.txn_of(txn).await?;
        let header = self.header(answer.revision);
        let shapes = if answer.succeeded { success } else { failure };
        let responses = answer.results.into_iter().zip(shapes).map(|(result, shape)| {
            let response = match (result, shape) {
                (OpResult::Range(found), Some(shape)) => PbTxnOpResponse::ResponseRange(shape.answer(found, header)),
                (OpResult::Delete { count, prevs }, _) => {
                    PbTxnOpResponse::ResponseDeleteRange(PbDeleteResponse { header, ..deleted(count, prevs) })
                }
                (OpResult::Put { prev }, _) => {
                    PbTxnOpResponse::ResponsePut(PbPutResponse { header, prev_kv: prev.map(convert::key_value) })
                }
                (OpResult::Range(_), None) => return PbResponseOp { response: None },
            };
            PbResponseOp { response: Some(response) }
        });
        let responses = responses.collect();
        Ok(Response::new(PbTxnResponse { header, succeeded: answer.succeeded, responses }))
    }

    async fn compact(&self, request: Request<PbCompactionRequest>) -> Result<Response<PbCompactionResponse>, Status> {
        let revision = Revision::new(request.into_inner().revision);
        if !revision.is_set() {
            // etcd treats all revisions before its first revision as compacted.
            return Err(Refusal::Compacted.into());
        }
        self.backing.compact(revision).await.map_err(|error| status(&error))?;
        let now = self.revision().await?;
        Ok(Response::new(PbCompactionResponse { header: self.header(now) }))
    }
}

impl Api {
    /// Refuses a revision that is less than the oldest revision for clients, even if the store can still read the
    /// revision.
    fn check_past(&self, revision: i64) -> Result<(), Status> {
        let is_past = revision > 0 && revision < self.backing.oldest().get();
        if is_past { Err(Refusal::Compacted.into()) } else { Ok(()) }
    }

    async fn txn_of(&self, txn: Txn) -> Result<kv::TxnResponse, Status> {
        let puts = txn.success.iter().chain(&txn.failure).any(|op| matches!(op, Op::Put { .. }));
        let store = if puts { self.backing.store() } else { self.backing.store_to_release() };
        store.txn(txn).await.map_err(|error| status(&error))
    }

    /// Carries out a put that keeps the stored value or lease. Reads the key first, and repeats the put if another
    /// writer changes the key between the read and the write.
    async fn put_what_is_there(&self, put: PbPutRequest) -> Result<kv::TxnResponse, Status> {
        for _ in 0..ATTEMPTS {
            let mut again = put.clone();
            let read = RangeRequest::new(convert::range(put.key.clone(), Vec::new())?);
            let found = self.backing.store().range(read).await.map_err(|error| status(&error))?;
            let Some(stored) = found.kvs.into_iter().next() else { return Err(Refusal::KeyNotFound.into()) };
            if put.ignore_value {
                again.value = stored.value.as_bytes().to_vec();
            }
            if put.ignore_lease {
                again.lease = LeaseId::number(stored.lease);
            }
            let is_unchanged = Compare::unchanged(stored.key.clone(), stored.mod_revision);
            let txn = Txn::new().with_compares([is_unchanged]).with_success([convert::put_of(again)?]);
            let answer = self.txn_of(txn).await?;
            if answer.succeeded {
                return Ok(answer);
            }
        }
        Err(Refusal::TooManyRequests.into())
    }
}

fn deleted(count: u64, prevs: Vec<kv::Kv>) -> PbDeleteResponse {
    PbDeleteResponse {
        header: None,
        deleted: i64::try_from(count).unwrap_or(i64::MAX),
        prev_kvs: prevs.into_iter().map(convert::key_value).collect(),
    }
}
