//! The cases, one file per topic.

pub(crate) mod basic;
pub(crate) mod concurrency;
pub(crate) mod crash;
pub(crate) mod faults_access;
pub(crate) mod faults_cluster;
pub(crate) mod faults_network;
pub(crate) mod faults_server;
pub(crate) mod faults_watch;
pub(crate) mod history;
pub(crate) mod limits;
pub(crate) mod network;
pub(crate) mod processes;
pub(crate) mod random;
pub(crate) mod random_clients;
pub(crate) mod range;
pub(crate) mod recorded;
pub(crate) mod revisions;
pub(crate) mod steps;
pub(crate) mod txn;
pub(crate) mod txn_compare;
pub(crate) mod watch;
pub(crate) mod watch_load;
pub(crate) mod watch_past;
pub(crate) mod workload;
