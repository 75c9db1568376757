//! Parses the rules of stores from `SEMANTICS.md`.

/// One numbered rule of `SEMANTICS.md`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The number of the rule, for example `R2`.
    pub id: String,
    /// The text of the rule on one line.
    pub text: String,
}

/// Returns all rules in the order of `SEMANTICS.md`.
pub fn rules() -> Vec<Rule> {
    parse(kv::SEMANTICS)
}

/// The text of the rule with this number, or an empty string if there is no such rule.
pub(crate) fn text_of(id: &str) -> String {
    rules().into_iter().find(|rule| rule.id == id).map(|rule| rule.text).unwrap_or_default()
}

/// Returns the number of a rule as a static string, for example `"R2"`.
pub(crate) fn number_of(id: &str) -> Option<&'static str> {
    kv::SEMANTICS.lines().filter_map(item).map(|(known, _)| known).find(|known| *known == id)
}

/// Parses a page. In `SEMANTICS.md`, a rule is a list item that begins with its number in bold. Indented lines after a
/// rule's first line belong to the rule, too.
fn parse(page: &str) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    let mut open = false;
    for line in page.lines() {
        if let Some((id, text)) = item(line) {
            open = true;
            rules.push(Rule { id: id.to_owned(), text: text.trim().to_owned() });
        } else if line.starts_with("  ") && open {
            if let Some(rule) = rules.last_mut() {
                rule.text.push(' ');
                rule.text.push_str(line.trim());
            }
        } else {
            open = false;
        }
    }
    rules
}

/// If a rule begins on this line, returns its number and its first words.
fn item(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("- **")?.split_once("**").filter(|(id, _)| is_id(id))
}

/// Returns true for a rule number: a capital letter and a number without leading zeros.
fn is_id(id: &str) -> bool {
    let mut letters = id.chars();
    letters.next().is_some_and(|first| first.is_ascii_uppercase())
        && letters.as_str().parse::<u32>().is_ok_and(|number| number.to_string() == letters.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_text_runs_over_indented_lines() {
        let page = "# Title\n- **A1** One\n  and more.\n- **Not a rule** no\n  more of it\n- **A2** Two.\n\nText **A3** here\n";
        let rule = |id: &str, text: &str| Rule { id: id.to_owned(), text: text.to_owned() };
        assert_eq!(parse(page), [rule("A1", "One and more."), rule("A2", "Two.")]);
    }
}
