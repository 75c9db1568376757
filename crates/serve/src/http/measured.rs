//! `/metrics`: the daemon's own numbers, and those of the store that `margay metrics` prints.

use std::fmt::Write;
use std::sync::Arc;

use hyper::StatusCode;
use ipam_core::samples::{Samples, oldest_revision};
use kv::Deadline;
use tokio::time::timeout;

use super::Shown;
use super::answer::{Answer, Failure, whole};

const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All numbers. If the store cannot be read, its numbers are missing, and `margay_serve_store_read` is 0.
pub(super) async fn answer(shown: &Arc<Shown>) -> Answer {
    let samples = match timeout(shown.limits.answer, samples(shown)).await {
        Ok(Ok(samples)) => Some(samples.text()),
        Ok(Err(failure)) => {
            tracing::warn!(error = failure.text, "the store cannot be read for its numbers");
            None
        }
        Err(_) => None,
    };
    let read = u8::from(samples.is_some());
    let mut text = samples.unwrap_or_default();
    _ = write!(
        text,
        "# HELP margay_serve_store_read 1 if the store could be read for this answer, else 0.\n\
         # TYPE margay_serve_store_read gauge\nmargay_serve_store_read {read}\n{}# EOF\n",
        shown.metrics.text()
    );
    whole(StatusCode::OK, KIND, text)
}

async fn samples(shown: &Arc<Shown>) -> Result<Samples, Failure> {
    let (node, boot) = (&shown.about.node, shown.about.boot.as_deref());
    let mut samples = Samples::default();
    let revision = match &shown.reach {
        Some(reach) => {
            let share = shown.operator.ipam().share_of(node, &reach(), Deadline::after(shown.limits.answer)).await?;
            samples.of_node(&share, boot);
            share.revision
        }
        None => {
            let census = shown.asked.census(shown.operator.ipam()).await?;
            samples.of_all(&census, node, boot);
            // A forecast that takes long goes on without this answer, and the next one has it.
            let forecast = tokio::spawn({
                let shown = Arc::clone(shown);
                async move { shown.asked.forecast(&shown.operator).await }
            });
            match timeout(shown.limits.answer / 2, forecast).await {
                Ok(Ok(Ok(forecast))) => forecast.pools.iter().for_each(|pool| pool.sample(&mut samples)),
                Ok(Ok(Err(failure))) => {
                    tracing::warn!(error = failure.text, "the history cannot be read for a forecast");
                }
                _ => tracing::warn!("the forecast takes long; the next answer may have it"),
            }
            census.revision
        }
    };
    samples.of_store(revision, oldest_revision(&*shown.store, revision).await?);
    if let Some(held) = &shown.history
        && let Ok(history) = held
            .with_embedded(|store, _| async move {
                Ok((store.oldest().await?.time, store.status().log_bytes, store.retention().bytes))
            })
            .await
    {
        let (oldest, log_bytes, most) = history;
        samples.of_history(oldest, log_bytes, most);
    }
    Ok(samples)
}
