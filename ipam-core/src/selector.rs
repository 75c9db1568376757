//! Parses and matches Calico's selector language, which selects nodes or namespaces for a pool by their labels.
//!
//! ```text
//! all()   global()   has(k)   !x   x && y   x || y   (x)
//! k == 'v'   k != 'v'   k in {'a', 'b'}   k not in {'a'}   k contains 'v'   k starts with 'v'   k ends with 'v'
//! ```
//! The operator `&&` binds tighter than `||`, and `!` binds tighter than `&&`. For a missing label, `!=` and `not in`
//! are true, and all other comparisons are false. An empty selector matches everything.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::model::Labels;

/// A parsed selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    root: Expression,
}

/// An expression of a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Expression {
    All,
    Global,
    Has(String),
    Compare(String, Comparison, String),
    In(String, BTreeSet<String>),
    NotIn(String, BTreeSet<String>),
    Not(Box<Expression>),
    // A conjunction of two or more expressions.
    And(Vec<Expression>),
    // A disjunction of two or more expressions.
    Or(Vec<Expression>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Equal,
    NotEqual,
    Contains,
    StartsWith,
    EndsWith,
}

impl Selector {
    /// Returns the selector that matches everything.
    pub fn all() -> Self {
        Self { root: Expression::All }
    }

    /// True if the selector matches the given labels.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.root.matches(labels)
    }

    /// True if the selector contains `global()`.
    pub fn uses_global(&self) -> bool {
        self.root.uses_global()
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    /// Parses a selector.
    ///
    /// # Errors
    /// [`SelectorError`] if the text is not a valid selector, or exceeds the maximum length or nesting.
    fn from_str(text: &str) -> Result<Self, SelectorError> {
        Ok(Self { root: parse(text)? })
    }
}

impl Expression {
    fn matches(&self, labels: &Labels) -> bool {
        let value = |key: &String| labels.get(key);
        match self {
            Self::All | Self::Global => true,
            Self::Has(key) => labels.contains_key(key),
            Self::Compare(key, Comparison::NotEqual, text) => value(key) != Some(text),
            Self::Compare(key, comparison, text) => value(key).is_some_and(|value| comparison.holds(value, text)),
            Self::In(key, texts) => value(key).is_some_and(|value| texts.contains(value)),
            Self::NotIn(key, texts) => value(key).is_none_or(|value| !texts.contains(value)),
            Self::Not(inner) => !inner.matches(labels),
            Self::And(parts) => parts.iter().all(|part| part.matches(labels)),
            Self::Or(parts) => parts.iter().any(|part| part.matches(labels)),
        }
    }

    fn uses_global(&self) -> bool {
        match self {
            Self::Global => true,
            Self::Not(inner) => inner.uses_global(),
            Self::And(parts) | Self::Or(parts) => parts.iter().any(Self::uses_global),
            _ => false,
        }
    }

    /// Returns how tightly the expression's operator binds; a greater number binds tighter. A subexpression that binds
    /// tighter than the expression around it is displayed without parentheses. With redundant parentheses, the
    /// displayed selector could be nested too deep to be parsed again.
    fn tightness(&self) -> u8 {
        match self {
            Self::Or(_) => 0,
            Self::And(_) => 1,
            Self::Not(_) => 2,
            _ => 3,
        }
    }

    fn fmt_part(&self, f: &mut fmt::Formatter<'_>, part: &Self) -> fmt::Result {
        if part.tightness() > self.tightness() { write!(f, "{part}") } else { write!(f, "({part})") }
    }

    fn fmt_joined(&self, f: &mut fmt::Formatter<'_>, operator: &str, parts: &[Self]) -> fmt::Result {
        for (place, part) in parts.iter().enumerate() {
            if place > 0 {
                write!(f, " {operator} ")?;
            }
            self.fmt_part(f, part)?;
        }
        Ok(())
    }
}

impl Comparison {
    fn holds(self, value: &str, text: &str) -> bool {
        match self {
            Self::Equal => value == text,
            Self::NotEqual => value != text,
            Self::Contains => value.contains(text),
            Self::StartsWith => value.starts_with(text),
            Self::EndsWith => value.ends_with(text),
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Equal => "==",
            Self::NotEqual => "!=",
            Self::Contains => "contains",
            Self::StartsWith => "starts with",
            Self::EndsWith => "ends with",
        }
    }
}

/// A string of a selector, displayed with quotes. A string in a selector cannot contain both kinds of quotes, because
/// the parser ends the string at the quote that opened it.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quote = if self.0.contains('\'') { '"' } else { '\'' };
        write!(f, "{quote}{}{quote}", self.0)
    }
}

fn fmt_set(f: &mut fmt::Formatter<'_>, key: &str, operator: &str, texts: &BTreeSet<String>) -> fmt::Result {
    write!(f, "{key} {operator} {{")?;
    for (place, text) in texts.iter().enumerate() {
        write!(f, "{}{}", if place == 0 { "" } else { ", " }, Quoted(text))?;
    }
    f.write_str("}")
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all()"),
            Self::Global => f.write_str("global()"),
            Self::Has(key) => write!(f, "has({key})"),
            Self::Compare(key, comparison, text) => write!(f, "{key} {} {}", comparison.as_str(), Quoted(text)),
            Self::In(key, texts) => fmt_set(f, key, "in", texts),
            Self::NotIn(key, texts) => fmt_set(f, key, "not in", texts),
            Self::Not(inner) => {
                f.write_str("!")?;
                self.fmt_part(f, inner)
            }
            Self::And(parts) => self.fmt_joined(f, "&&", parts),
            Self::Or(parts) => self.fmt_joined(f, "||", parts),
        }
    }
}

impl fmt::Display for Selector {
    /// Formats the selector in a canonical form. Parsing the formatted text gives an equal selector, unless the text
    /// exceeds [`MAX_SELECTOR_BYTES`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.root.fmt(f)
    }
}

/// Maximum length of a selector, in bytes.
pub const MAX_SELECTOR_BYTES: usize = 64 * 1024;

/// Maximum nesting of parentheses in a selector. The functions that parse, display and match a selector are recursive,
/// so the nesting determines how much stack they need.
pub const MAX_DEPTH: usize = 100;

fn parse(text: &str) -> Result<Expression, SelectorError> {
    if text.len() > MAX_SELECTOR_BYTES {
        return Err(SelectorError::new(MAX_SELECTOR_BYTES, SelectorErrorKind::TooLong));
    }
    let mut parser = Parser::new(text)?;
    if parser.token == Token::End {
        return Ok(Expression::All);
    }
    let root = parser.any_of()?;
    if parser.token == Token::End { Ok(root) } else { parser.error(SelectorErrorKind::Unexpected) }
}

struct Parser<'a> {
    tokens: Tokens<'a>,
    position: usize,
    token: Token<'a>,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Result<Self, SelectorError> {
        let mut tokens = Tokens::new(text);
        let (position, token) = tokens.next()?;
        Ok(Self { tokens, position, token, depth: 0 })
    }

    fn advance(&mut self) -> Result<Token<'a>, SelectorError> {
        let (position, next) = self.tokens.next()?;
        self.position = position;
        Ok(std::mem::replace(&mut self.token, next))
    }

    fn error<T>(&self, kind: SelectorErrorKind) -> Result<T, SelectorError> {
        Err(SelectorError::new(self.position, kind))
    }

    /// Parses `x || y || ...`.
    fn any_of(&mut self) -> Result<Expression, SelectorError> {
        let mut parts = vec![self.all_of()?];
        while self.token == Token::Or {
            self.advance()?;
            parts.push(self.all_of()?);
        }
        Ok(one_or(parts, Expression::Or))
    }

    /// Parses `x && y && ...`.
    fn all_of(&mut self) -> Result<Expression, SelectorError> {
        let mut parts = vec![self.negatable()?];
        while self.token == Token::And {
            self.advance()?;
            parts.push(self.negatable()?);
        }
        Ok(one_or(parts, Expression::And))
    }

    /// Parses `!!...x`. An even number of `!` operators cancels out.
    fn negatable(&mut self) -> Result<Expression, SelectorError> {
        let mut negated = false;
        while self.token == Token::Not {
            self.advance()?;
            negated = !negated;
        }
        let inner = self.operand()?;
        Ok(if negated { Expression::Not(Box::new(inner)) } else { inner })
    }

    fn operand(&mut self) -> Result<Expression, SelectorError> {
        match self.token {
            Token::LeftParen => self.group(),
            Token::All => self.advance().map(|_| Expression::All),
            Token::Global => self.advance().map(|_| Expression::Global),
            Token::Has(key) => self.advance().map(|_| Expression::Has(key.to_owned())),
            Token::Label(key) => {
                self.advance()?;
                self.comparison(key)
            }
            Token::End => self.error(SelectorErrorKind::UnexpectedEnd),
            _ => self.error(SelectorErrorKind::Unexpected),
        }
    }

    fn group(&mut self) -> Result<Expression, SelectorError> {
        if self.depth == MAX_DEPTH {
            return self.error(SelectorErrorKind::TooDeep);
        }
        self.depth += 1;
        self.advance()?;
        let inner = self.any_of()?;
        self.expect(Token::RightParen, ')')?;
        self.depth -= 1;
        Ok(inner)
    }

    fn expect(&mut self, token: Token<'_>, shown: char) -> Result<(), SelectorError> {
        if self.token != token {
            return self.error(SelectorErrorKind::ExpectedClosing(shown));
        }
        self.advance().map(drop)
    }

    fn comparison(&mut self, key: &str) -> Result<Expression, SelectorError> {
        let key = key.to_owned();
        match self.token {
            Token::Compare(comparison) => {
                self.advance()?;
                let Token::Text(text) = self.token else { return self.error(SelectorErrorKind::ExpectedString) };
                self.advance()?;
                Ok(Expression::Compare(key, comparison, text.to_owned()))
            }
            Token::In => {
                self.advance()?;
                Ok(Expression::In(key, self.set()?))
            }
            Token::NotIn => {
                self.advance()?;
                Ok(Expression::NotIn(key, self.set()?))
            }
            _ => self.error(SelectorErrorKind::ExpectedOperator),
        }
    }

    /// Parses a set such as `{'a', 'b'}`. The braces may be empty, and a comma may follow the last string.
    fn set(&mut self) -> Result<BTreeSet<String>, SelectorError> {
        if self.token != Token::LeftBrace {
            return self.error(SelectorErrorKind::ExpectedSet);
        }
        self.advance()?;
        let mut texts = BTreeSet::new();
        while let Token::Text(text) = self.token {
            self.advance()?;
            texts.insert(text.to_owned());
            if self.token != Token::Comma {
                break;
            }
            self.advance()?;
        }
        self.expect(Token::RightBrace, '}')?;
        Ok(texts)
    }
}

/// Joins subexpressions into one expression. If there is only one subexpression, returns it unchanged.
fn one_or(mut parts: Vec<Expression>, join: impl FnOnce(Vec<Expression>) -> Expression) -> Expression {
    match parts.pop() {
        Some(only) if parts.is_empty() => only,
        Some(last) => {
            parts.push(last);
            join(parts)
        }
        None => join(parts),
    }
}

/// Maximum length of a label's name, in bytes.
const MAX_LABEL_BYTES: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token<'a> {
    Label(&'a str),
    Text(&'a str),
    Compare(Comparison),
    In,
    NotIn,
    All,
    Global,
    Has(&'a str),
    Not,
    And,
    Or,
    LeftParen,
    RightParen,
    LeftBrace,
    RightBrace,
    Comma,
    End,
}

/// The error for a text that is not a valid selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid selector: {kind} at position {position}")]
pub struct SelectorError {
    position: usize,
    kind: SelectorErrorKind,
}

/// The reason why a selector cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum SelectorErrorKind {
    /// The text has a character that is not allowed at the position of the error, or continues after a complete
    /// selector.
    #[error("unexpected characters")]
    Unexpected,
    /// A quoted string has no closing quote.
    #[error("unterminated string")]
    UnterminatedString,
    /// The selector ends where another token is expected.
    #[error("unexpected end")]
    UnexpectedEnd,
    /// A comparison operator is not followed by a quoted string.
    #[error("expected a string in quotes")]
    ExpectedString,
    /// The operator `in` is not followed by a set in braces.
    #[error("expected a set in braces")]
    ExpectedSet,
    /// A set, a function call or a group in parentheses has no closing character.
    #[error("expected {0}")]
    ExpectedClosing(char),
    /// A label is not followed by a comparison operator.
    #[error("expected a comparison after the label")]
    ExpectedOperator,
    /// `has()` does not contain the name of a label.
    #[error("expected the name of a label")]
    ExpectedLabel,
    /// The name of a label has more than 512 bytes.
    #[error("a label has at most {MAX_LABEL_BYTES} characters")]
    LabelTooLong,
    /// The selector is longer than [`MAX_SELECTOR_BYTES`].
    #[error("longer than {} bytes", MAX_SELECTOR_BYTES)]
    TooLong,
    /// Parentheses are nested deeper than [`MAX_DEPTH`].
    #[error("more than {} parentheses in each other", MAX_DEPTH)]
    TooDeep,
}

impl SelectorError {
    fn new(position: usize, kind: SelectorErrorKind) -> Self {
        Self { position, kind }
    }

    /// Returns the position of the error, in bytes from the start of the selector.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Returns the reason why the selector cannot be parsed.
    pub fn kind(&self) -> SelectorErrorKind {
        self.kind
    }
}

struct Tokens<'a> {
    text: &'a str,
    position: usize,
    // True if the previous token was the name of a label. The word `in` is an operator only after the name of a label;
    // elsewhere, it is itself the name of a label.
    after_label: bool,
}

impl<'a> Tokens<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, position: 0, after_label: false }
    }

    /// Returns the next token and the position of its first byte. At the end of the text, always returns
    /// [`Token::End`].
    fn next(&mut self) -> Result<(usize, Token<'a>), SelectorError> {
        self.skip_blanks();
        let start = self.position;
        let token = self.cut()?;
        self.after_label = matches!(token, Token::Label(_));
        Ok((start, token))
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.position..).unwrap_or("")
    }

    fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.position += rest.len() - rest.trim_start_matches([' ', '\t']).len();
    }

    fn take(&mut self, prefix: &str) -> bool {
        let found = self.rest().starts_with(prefix);
        if found {
            self.position += prefix.len();
        }
        found
    }

    fn error<T>(&self, kind: SelectorErrorKind) -> Result<T, SelectorError> {
        Err(SelectorError::new(self.position, kind))
    }

    fn cut(&mut self) -> Result<Token<'a>, SelectorError> {
        let symbols = [
            ("==", Token::Compare(Comparison::Equal)),
            ("!=", Token::Compare(Comparison::NotEqual)),
            ("&&", Token::And),
            ("||", Token::Or),
            ("!", Token::Not),
            ("(", Token::LeftParen),
            (")", Token::RightParen),
            ("{", Token::LeftBrace),
            ("}", Token::RightBrace),
            (",", Token::Comma),
        ];
        for (symbol, token) in symbols {
            if self.take(symbol) {
                return Ok(token);
            }
        }
        match self.rest().chars().next() {
            None => Ok(Token::End),
            Some(quote @ ('\'' | '"')) => self.string(quote),
            Some(_) if self.after_label => self.operator(),
            Some(_) => self.word(),
        }
    }

    fn string(&mut self, quote: char) -> Result<Token<'a>, SelectorError> {
        let inner = self.rest().get(1..).unwrap_or("");
        let Some(length) = inner.find(quote) else {
            return self.error(SelectorErrorKind::UnterminatedString);
        };
        self.position += length + 2;
        Ok(Token::Text(inner.get(..length).unwrap_or("")))
    }

    /// Parses an operator that is a word, such as `in`. As in Calico, no space is needed between the operator and the
    /// following token, so `a in{'b'}` is valid.
    fn operator(&mut self) -> Result<Token<'a>, SelectorError> {
        let start = self.position;
        if self.take("contains") {
            return Ok(Token::Compare(Comparison::Contains));
        }
        if self.take("in") {
            return Ok(Token::In);
        }
        let two_words = [
            ("starts", "with", Token::Compare(Comparison::StartsWith)),
            ("ends", "with", Token::Compare(Comparison::EndsWith)),
            ("not", "in", Token::NotIn),
        ];
        for (first, second, token) in two_words {
            if self.take(first) {
                self.skip_blanks();
                if self.take(second) {
                    return Ok(token);
                }
                break;
            }
        }
        Err(SelectorError::new(start, SelectorErrorKind::ExpectedOperator))
    }

    fn word(&mut self) -> Result<Token<'a>, SelectorError> {
        if self.take("has(") {
            self.skip_blanks();
            let label = self.label()?;
            self.close()?;
            return if label.is_empty() { self.error(SelectorErrorKind::ExpectedLabel) } else { Ok(Token::Has(label)) };
        }
        if self.take("all(") {
            self.close()?;
            return Ok(Token::All);
        }
        if self.take("global(") {
            self.close()?;
            return Ok(Token::Global);
        }
        let label = self.label()?;
        if label.is_empty() { self.error(SelectorErrorKind::Unexpected) } else { Ok(Token::Label(label)) }
    }

    fn close(&mut self) -> Result<(), SelectorError> {
        self.skip_blanks();
        if self.take(")") { Ok(()) } else { self.error(SelectorErrorKind::ExpectedClosing(')')) }
    }

    /// Parses the name of a label, which may be empty, at the current position.
    fn label(&mut self) -> Result<&'a str, SelectorError> {
        let rest = self.rest();
        let of_label = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '-');
        let length = rest.find(|c| !of_label(c)).unwrap_or(rest.len());
        if length > MAX_LABEL_BYTES {
            return self.error(SelectorErrorKind::LabelTooLong);
        }
        self.position += length;
        Ok(rest.get(..length).unwrap_or(""))
    }
}

#[cfg(test)]
mod tests;
