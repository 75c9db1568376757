//! The log: to standard error and, if configured, to a file; never to standard output.

use std::io::{self, Write};

use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::{Extensions, ExtensionsMut, LookupSpan, SpanData};

use crate::log_file::{Limits, LogFile};
use crate::netconf::NetConf;

/// Sends the log of this process where the configuration says. A file that cannot be opened costs the log in the file, not
/// the call. Only the first call in a process counts.
pub(crate) fn install(conf: &NetConf) {
    let (level, file) = (conf.log_level.as_str(), conf.log_file.as_str());
    let limits = Limits::new(conf.log_max_size, conf.log_max_age, conf.log_max_count);
    let opened = (!file.is_empty()).then(|| LogFile::open(file, limits));
    let (file, problem) = match opened {
        None => (None, None),
        Some(Ok(file)) => (Some(file), None),
        Some(Err(error)) => (None, Some(error)),
    };
    let lines = fmt::layer().with_ansi(false).with_target(false).with_writer(Places { file });
    let subscriber = NoSpans.with(lines).with(reported(filter(level)));
    // An error means that the process has a log already, which stays.
    if tracing::subscriber::set_global_default(subscriber).is_ok()
        && let Some(error) = problem
    {
        tracing::warn!("cannot log to log_file_path: {error}");
    }
}

/// A base for layers that keeps no spans: a call makes none. The library's own registry first makes room for the spans of
/// thousands of threads, which is 1 % of a cold ADD.
struct NoSpans;

impl Subscriber for NoSpans {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _attributes: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, _event: &Event<'_>) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

impl<'a> LookupSpan<'a> for NoSpans {
    type Data = NoSpan;

    fn span_data(&'a self, _id: &Id) -> Option<NoSpan> {
        None
    }
}

/// A span that is kept.
enum NoSpan {}

impl SpanData<'_> for NoSpan {
    fn id(&self) -> Id {
        match *self {}
    }

    fn metadata(&self) -> &'static Metadata<'static> {
        match *self {}
    }

    fn parent(&self) -> Option<&Id> {
        match *self {}
    }

    fn extensions(&self) -> Extensions<'_> {
        match *self {}
    }

    fn extensions_mut(&self) -> ExtensionsMut<'_> {
        match *self {}
    }
}

/// The places for lines: standard error, and the file if there is one.
struct Places {
    file: Option<LogFile>,
}

impl<'a> MakeWriter<'a> for Places {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { file: self.file.as_ref() }
    }
}

/// Writes to all places and never fails: an address may be committed by now, and a log that nobody reads or a full disk
/// must not turn that into an error.
struct Line<'a> {
    file: Option<&'a LogFile>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        if let Some(file) = self.file {
            let _ = file.write(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The level: debug, info, warning or error in any case, else info.
fn filter(level: &str) -> LevelFilter {
    match level.to_ascii_lowercase().as_str() {
        "debug" => LevelFilter::DEBUG,
        "warn" | "warning" => LevelFilter::WARN,
        "error" => LevelFilter::ERROR,
        _ => LevelFilter::INFO,
    }
}

/// The beginnings of the names of our own crates.
const OURS: [&str; 9] = ["agent", "backend_", "cni_plugin", "datastore", "host", "ipam_core", "kv", "margay", "wiring"];

/// The events that are logged at this level. Of the libraries only warnings and errors are logged: at `debug` those for
/// clusters report every frame that goes over the wire.
fn reported(level: LevelFilter) -> Targets {
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_targets(OURS.map(|target| (target, level)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_tell_only_what_may_need_somebody() {
        let reported = |level, target, of| reported(level).would_enable(target, &of);
        for target in [
            "agent::served",
            "backend_etcd::cluster",
            "cni_plugin::run",
            "margay::transact",
            "kv_mvcc::queue",
            "ipam_core",
        ] {
            assert!(reported(LevelFilter::DEBUG, target, tracing::Level::DEBUG), "{target}");
            assert!(!reported(LevelFilter::INFO, target, tracing::Level::DEBUG), "{target}");
        }
        for target in ["h2::codec", "rustls::client", "hyper_util::client", "tonic"] {
            assert!(!reported(LevelFilter::DEBUG, target, tracing::Level::DEBUG), "{target}");
            assert!(reported(LevelFilter::DEBUG, target, tracing::Level::WARN), "{target}");
            assert!(!reported(LevelFilter::ERROR, target, tracing::Level::WARN), "{target}");
        }
    }

    #[test]
    fn levels() {
        let cases = [
            ("DEBUG", LevelFilter::DEBUG),
            ("Info", LevelFilter::INFO),
            ("", LevelFilter::INFO),
            ("loud", LevelFilter::INFO),
            ("warning", LevelFilter::WARN),
            ("error", LevelFilter::ERROR),
        ];
        for (level, expected) in cases {
            assert_eq!(filter(level), expected, "{level}");
        }
    }
}
