//! The daemon `margay serve`: one process that keeps a store open for plugins, commands and people.
//!
//! - [`held`]: the store. Other processes that wait for its lock get it, and the daemon takes it back; `gate` says who may use or
//!   close it, `calls` has its calls, `watch_on` the watches that go on after a hand-over.
//! - [`lane`]: the verbs that write, one commit at a time; on an embedded store one commit for all ADDs that wait.
//! - [`pulse`]: when the store last finished something, for clients that wait.
//! - [`daemon`] and `connection`: the private socket of plugins and commands; `keys` is the store behind it.
//! - [`socket`]: the right to serve a store, and the socket's place.
//! - [`http`]: numbers for Prometheus and the page, from [`metrics`] and the store.
//! - [`api`]: etcd's API in front of an embedded store, for other programs.
//! - [`life`]: start, readiness, watchdog, end.

pub mod api;
pub mod asker;
mod calls;
mod connection;
pub mod daemon;
mod eyes;
mod gate;
pub mod held;
pub mod http;
mod keys;
pub mod lane;
pub mod life;
pub mod metrics;
mod pages;
pub mod pulse;
pub mod socket;
mod watch_on;
