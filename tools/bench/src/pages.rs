//! Updates pages of the book with the findings of a benchmark run.
//!
//! In a page, a table is between two HTML comments: the first contains `measured:` and the table's name, the second
//! contains `end`. A new finding replaces the text between the two comments of its table. A table without a new finding
//! stays unchanged. Plots are files.

use std::fs;
use std::path::Path;

use crate::Outcome;
use crate::findings::Findings;
use crate::plot;

const BEGIN: &str = "<!-- measured: ";
const BEGIN_END: &str = " -->\n";
const END: &str = "<!-- end -->";
/// The pages with measured tables, as paths relative to the root of the repository.
const PAGES: [&str; 1] = ["docs/performance.md"];
const PLOTS: &str = "docs/performance";

/// Updates the pages of the repository at `root` with the findings.
#[expect(clippy::print_stdout, reason = "prints its result")]
pub(crate) fn update(findings: &Findings, root: &Path) -> Outcome<()> {
    for page in PAGES {
        let path = root.join(page);
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let (text, filled) = fill(&text, findings).map_err(|error| format!("{}: {error}", path.display()))?;
        fs::write(&path, text)?;
        println!("{}: {filled} tables", path.display());
    }
    let folder = root.join(PLOTS);
    fs::create_dir_all(&folder)?;
    for (name, plot) in &findings.plots {
        let path = folder.join(format!("{name}.svg"));
        plot::draw(plot, &path)?;
        println!("{}", path.display());
    }
    Ok(())
}

/// Replaces each table on a page for which `findings` has new values. Returns the new page and the number of replaced
/// tables.
fn fill(page: &str, findings: &Findings) -> Result<(String, usize), String> {
    let (mut done, mut rest, mut filled) = (String::new(), page, 0);
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, section) = after.split_once(BEGIN_END).ok_or("a mark that does not end on its line")?;
        let (old, after) = section.split_once(END).ok_or_else(|| format!("the section {name} has no {END}"))?;
        let new = findings.tables.get(name).map(|table| format!("{}\n", table.markdown()));
        filled += usize::from(new.is_some());
        let new = new.unwrap_or_else(|| old.to_owned());
        done.push_str(&format!("{before}{BEGIN}{name}{BEGIN_END}{new}{END}"));
        rest = after;
    }
    done.push_str(rest);
    Ok((done, filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Findings {
        let mut findings = Findings::default();
        findings.table("times", "Times".into(), &["", "ms"], vec![vec!["ADD".into(), "3".into()]]);
        findings
    }

    #[test]
    fn section_is_replaced_and_all_else_stays() {
        let page =
            "# A\n<!-- measured: times -->\nold\n<!-- end -->\nb\n<!-- measured: other -->\nkept\n<!-- end -->\nc";
        let (new, filled) = fill(page, &findings()).unwrap();
        assert_eq!(filled, 1);
        assert!(new.starts_with("# A\n<!-- measured: times -->\nTimes:\n\n|  | ms |\n"), "{new}");
        assert!(
            new.contains("| ADD | 3 |\n\n<!-- end -->\nb\n<!-- measured: other -->\nkept\n<!-- end -->\nc"),
            "{new}"
        );
        assert_eq!(fill(&new, &findings()).unwrap(), (new.clone(), 1));
    }

    #[test]
    fn section_is_error_when_it_does_not_end() {
        assert!(fill("<!-- measured: times -->\nold", &findings()).is_err());
    }
}
