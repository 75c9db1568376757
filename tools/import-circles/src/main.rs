//! Finds import circles in a crate: lists of source files of which each needs the next, and the last needs the first.
//!
//! The command `import-circles 3 FOLDER...` fails if the crate in one of the folders has an import circle of more than
//! three files. A source file needs another file if it names an item that the other file itself defines. Naming an item
//! that another file only re-exports does not make a file need that other file. Tests are ignored.

mod source;

use std::env;
use std::path::Path;
use std::process::ExitCode;

use petgraph::algo::tarjan_scc;
use petgraph::graph::{DiGraph, NodeIndex};

use source::Crate;

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let Some(most) = arguments.next().and_then(|most| most.parse().ok()) else {
        return fail("usage: import-circles MOST FOLDER...");
    };
    let mut code = ExitCode::SUCCESS;
    for folder in arguments {
        match circles(Path::new(&folder), most) {
            Ok(found) if found.is_empty() => {}
            Ok(found) => {
                for lines in found {
                    fail(&format!(
                        "{folder}: more than {most} files need each other in a circle:\n{}",
                        lines.join("\n")
                    ));
                }
                code = ExitCode::FAILURE;
            }
            Err(error) => return fail(&format!("{folder}: {error}")),
        }
    }
    code
}

#[allow(clippy::print_stderr, reason = "prints errors for the user")]
fn fail(text: &str) -> ExitCode {
    eprintln!("import-circles: {text}");
    ExitCode::FAILURE
}

/// Returns the import circles of more than `most` files in a crate. For each circle, the result has one line per file,
/// which lists the files of the circle that this file needs.
fn circles(folder: &Path, most: usize) -> Result<Vec<Vec<String>>, String> {
    let krate = Crate::read(&folder.join("src"))?;
    let mut graph = DiGraph::<&str, ()>::new();
    let nodes: Vec<NodeIndex> = krate.names().map(|name| graph.add_node(name)).collect();
    for (from, needs) in krate.needs().into_iter().enumerate() {
        for to in needs {
            graph.add_edge(nodes[from], nodes[to], ());
        }
    }
    let large = tarjan_scc(&graph).into_iter().filter(|circle| circle.len() > most);
    Ok(large
        .map(|circle| {
            let line = |&node: &NodeIndex| {
                let needed: Vec<_> =
                    graph.neighbors(node).filter(|other| circle.contains(other)).map(|other| graph[other]).collect();
                format!("  {} needs {}", graph[node], needed.join(", "))
            };
            circle.iter().map(line).collect()
        })
        .collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::fs;

    use super::*;

    fn found(files: &[(&str, &str)], most: usize) -> Vec<Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join("src").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        circles(folder.path(), most).unwrap()
    }

    #[test]
    fn circle_is_found_through_uses_paths_macros_and_re_exports() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c; mod d;"),
            ("a.rs", "use crate::b::{self, B};"),
            ("b/mod.rs", "pub(crate) use inner::B; mod inner; fn f() { crate::c::g() }"),
            ("b/inner.rs", "pub(crate) struct B; fn f() { println!(\"{}\", crate::c::G) }"),
            ("c.rs", "use super::d;"),
            ("d.rs", "type T = crate::a::T;"),
        ];
        let circle = found(&files, 3);
        assert_eq!(circle.len(), 1, "{circle:?}");
        let lines = circle[0].join("\n");
        for line in ["a needs b, b::inner", "b::inner needs c", "c needs d", "d needs a"] {
            let (file, others) = line.split_once(" needs ").unwrap();
            let of = lines.lines().find(|line| line.trim().starts_with(&format!("{file} needs"))).unwrap();
            assert!(others.split(", ").all(|other| of.contains(other)), "{line}: {of}");
        }
        assert!(found(&files, 5).is_empty());
    }

    #[test]
    fn circle_is_none_through_tests_and_re_exports_alone() {
        let files = [
            ("lib.rs", "mod a; pub use a::A; pub use b::B; mod b;"),
            ("a.rs", "pub struct A; #[cfg(test)] mod tests { use crate::b::B; use super::*; }"),
            ("b.rs", "use crate::a::A; pub struct B;"),
            ("a/tests.rs", "use crate::b::B;"),
        ];
        assert!(found(&files, 1).is_empty());
    }
}
