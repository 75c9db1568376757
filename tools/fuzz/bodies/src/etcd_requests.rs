//! Checks how the server of the etcd API decodes and answers requests.

use std::sync::Arc;

use etcd_api::Api;
use etcd_client::proto::{
    PbCompactionRequest, PbDeleteRequest, PbKvService, PbLeaseGrantRequest, PbLeaseRevokeRequest, PbLeaseService,
    PbLeaseTimeToLiveRequest, PbPutRequest, PbRangeRequest, PbTxnRequest,
};
use kv_mvcc::{FORMAT_WITH_LEASES, MemoryTable, MvccStore, Options};
use prost::Message;
use testkit::backing::Memory;
use tonic::Request;

/// Maximum number of etcd requests in one input; longer sequences find no additional faults.
const MOST: usize = 32;

/// Runs the fuzz target `etcd_requests` on an input. The input is a sequence of etcd requests, each with a byte for the
/// method, a byte for the length, and the message. The server must answer or reject each of the requests, and leave the
/// store intact.
pub fn etcd_requests(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let options = Options { format: FORMAT_WITH_LEASES, ..Options::default() };
        let store = Arc::new(MvccStore::open(Box::new(MemoryTable::new()), options).unwrap());
        let api = Api::new(Arc::new(Memory { store: Arc::clone(&store), url: "http://fuzz:1".to_owned() }));
        let clock = api.clone();
        let leases = tokio::spawn(async move { clock.end_leases().await });
        let mut rest = data;
        for _ in 0..MOST {
            let [method, length, body @ ..] = rest else { break };
            let (message, next) = body.split_at(body.len().min(usize::from(*length)));
            call(&api, *method, message).await;
            rest = next;
        }
        leases.abort();
        store.verify().await.unwrap();
    });
}

async fn call(api: &Api, method: u8, message: &[u8]) {
    /// Calls one method of the etcd API with a decoded request. The result of the call is ignored, because an error is
    /// as good as a response.
    macro_rules! call {
        ($request:ty, $service:ident :: $method:ident) => {
            if let Ok(request) = <$request>::decode(message) {
                let _ = $service::$method(api, Request::new(request)).await;
            }
        };
    }
    match method % 8 {
        0 => call!(PbPutRequest, PbKvService::put),
        1 => call!(PbRangeRequest, PbKvService::range),
        2 => call!(PbDeleteRequest, PbKvService::delete_range),
        3 => call!(PbTxnRequest, PbKvService::txn),
        4 => call!(PbCompactionRequest, PbKvService::compact),
        5 => call!(PbLeaseGrantRequest, PbLeaseService::lease_grant),
        6 => call!(PbLeaseRevokeRequest, PbLeaseService::lease_revoke),
        _ => call!(PbLeaseTimeToLiveRequest, PbLeaseService::lease_time_to_live),
    }
}
