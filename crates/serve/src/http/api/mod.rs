//! Answers the web page's requests with JSON documents. The JSON format is private to the daemon and the web page of
//! the same version, and may change.

mod blocks;
mod events;
mod overview;
mod search;

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use tokio::time::timeout;

use super::answer::{HttpError, HttpResponse, json, whole};
use super::{PageContext, route};

/// Answers a request of the web page. `question` is the path after `/api/`.
pub(super) async fn answer(question: &str, request: &Request<Incoming>, page: &Arc<PageContext>) -> HttpResponse {
    let query = Query::parse(request.uri().query().unwrap_or_default());
    let reading = async {
        match question {
            "about" => Ok(route::version(page)),
            "overview" => overview::overview(page).await,
            "forecast" => Ok(json(StatusCode::OK, &*page.cache.forecast(&page.operator).await?)),
            "blocks" => blocks::list_blocks(page, &query).await,
            "block" => blocks::show_block(page, &query).await,
            "address" => blocks::show_address(page, &query).await,
            "search" => search::answer(page, &query).await,
            "held" => search::list_held(page, &query).await,
            "history" => events::history(page, &query).await,
            "problems" => overview::problems(page).await,
            "events" => events::stream(page, request, &query).await,
            _ => Err(HttpError { status: StatusCode::NOT_FOUND, text: "there is no such question".to_owned() }),
        }
    };
    match timeout(page.limits.answer, reading).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(failure)) => failure.into(),
        Err(_) => {
            let seconds = page.limits.answer.as_secs();
            let text = format!("the store was not read within {seconds} s; another process may have it");
            HttpError { status: StatusCode::GATEWAY_TIMEOUT, text }.into()
        }
    }
}

/// Returns a response for a document that is already JSON text.
fn json_text_response(document: &str) -> HttpResponse {
    whole(StatusCode::OK, "application/json", document.to_owned())
}

/// The parsed query string of a request.
struct Query(Vec<(String, String)>);

impl Query {
    fn parse(text: &str) -> Self {
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            (decoded(name), decoded(value))
        };
        Self(text.split('&').filter(|part| !part.is_empty()).map(pair).collect())
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// Returns the value of a required parameter.
    fn need(&self, name: &str) -> Result<&str, HttpError> {
        self.get(name).ok_or_else(|| HttpError::bad_request(format!("the question has no {name}")))
    }

    /// Returns the value of a required parameter, parsed as `T`.
    fn parsed<T: std::str::FromStr>(&self, name: &str) -> Result<T, HttpError> {
        let text = self.need(name)?;
        text.parse().map_err(|_| HttpError::bad_request(format!("{name} cannot be {text:?}")))
    }
}

/// Decodes the percent encoding of a query parameter.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digit = |digit: Option<u8>| char::from(digit.unwrap_or_default()).to_digit(16);
        let mut ahead = rest.clone();
        let escaped = (byte == b'%').then(|| digit(ahead.next()).zip(digit(ahead.next()))).flatten();
        match escaped {
            Some((high, low)) => {
                // The conversion cannot fail, because two hexadecimal digits fit in a byte.
                bytes.push(u8::try_from(high * 16 + low).unwrap_or_default());
                rest = ahead;
            }
            None => bytes.push(if byte == b'+' { b' ' } else { byte }),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let query = Query::parse("q=a+b%2Fc%3c&&empty=&bad=%4&worse=%zz%&utf=%C3%BC%ff");
        let reported = |name| query.get(name);
        assert_eq!((reported("q"), reported("empty"), reported("none")), (Some("a b/c<"), Some(""), None));
        assert_eq!(
            (reported("bad"), reported("worse"), reported("utf")),
            (Some("%4"), Some("%zz%"), Some("ü\u{fffd}"))
        );
        assert!(query.parsed::<u32>("q").is_err() && query.need("none").is_err());
    }
}
