//! The files of the page. They are part of the program.

use std::hash::{DefaultHasher, Hash, Hasher};

use hyper::header::{CACHE_CONTROL, ETAG, HeaderValue, IF_NONE_MATCH};
use hyper::{HeaderMap, StatusCode};

use super::answer::{Answer, whole};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// A file: its path, its type and its content.
type File = (&'static str, &'static str, &'static str);

const FILES: &[File] = &[
    ("/", HTML, include_str!("page/index.html")),
    ("/style.css", CSS, include_str!("page/style.css")),
    ("/theme.js", SCRIPT, include_str!("page/theme.js")),
    ("/page.js", SCRIPT, include_str!("page/page.js")),
    ("/api.js", SCRIPT, include_str!("page/api.js")),
    ("/dom.js", SCRIPT, include_str!("page/dom.js")),
    ("/format.js", SCRIPT, include_str!("page/format.js")),
    ("/overview.js", SCRIPT, include_str!("page/overview.js")),
    ("/pool.js", SCRIPT, include_str!("page/pool.js")),
    ("/map.js", SCRIPT, include_str!("page/map.js")),
    ("/block.js", SCRIPT, include_str!("page/block.js")),
    ("/address.js", SCRIPT, include_str!("page/address.js")),
    ("/events.js", SCRIPT, include_str!("page/events.js")),
    ("/problems.js", SCRIPT, include_str!("page/problems.js")),
];

/// The file at a path. A browser that has it already, as its tag says, gets an answer without it.
pub(super) fn file(path: &str, headers: &HeaderMap) -> Option<Answer> {
    let (_, kind, text) = FILES.iter().find(|(at, ..)| *at == path)?;
    let tag = tag(text);
    let has_it = headers.get(IF_NONE_MATCH).is_some_and(|held| held.as_bytes() == tag.as_bytes());
    let mut answer = match has_it {
        true => whole(StatusCode::NOT_MODIFIED, kind, ""),
        false => whole(StatusCode::OK, kind, *text),
    };
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        answer.headers_mut().insert(ETAG, tag);
    }
    Some(answer)
}

fn tag(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_a_file_names_is_there() {
        let is_there = |path: &str| FILES.iter().any(|(at, ..)| *at == path);
        for (path, _, text) in FILES {
            for line in text.lines().filter(|line| line.starts_with("import ")) {
                let named = line.rsplit('"').nth(1).and_then(|name| name.strip_prefix('.')).unwrap();
                assert!(is_there(named), "{path} imports {named}");
            }
            for part in text.split(['"', '\'']).filter(|_| *path == "/") {
                assert!(!part.ends_with(".js") || is_there(&format!("/{part}")), "{path} names {part}");
            }
        }
    }

    #[test]
    fn no_file_names_another_host_or_writes_html() {
        for (path, _, text) in FILES {
            for foreign in
                ["https://", "http://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
            {
                let found = text.matches(foreign).count();
                // The one name of a namespace is no address that anybody asks.
                let names = text.matches("http://www.w3.org/2000/svg").count();
                assert_eq!(found, if foreign == "http://" { names } else { 0 }, "{foreign} in {path}");
            }
        }
    }
}
