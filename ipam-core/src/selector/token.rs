//! From text to tokens.

use super::Comparison;

/// How long a label's name may be, in bytes.
const MAX_LABEL: usize = 512;

/// The parts of a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token<'a> {
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

/// A selector that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid selector: {kind} at position {position}")]
pub struct SelectorError {
    position: usize,
    kind: SelectorErrorKind,
}

/// Why a selector cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum SelectorErrorKind {
    /// A character, or something after a whole selector, that cannot stand there.
    #[error("unexpected characters")]
    Unexpected,
    /// A quoted string without its second quote.
    #[error("unterminated string")]
    UnterminatedString,
    /// Something must follow, and the selector ends.
    #[error("unexpected end")]
    UnexpectedEnd,
    /// A comparison needs a quoted string.
    #[error("expected a string in quotes")]
    ExpectedString,
    /// `in` needs a set in braces.
    #[error("expected a set in braces")]
    ExpectedSet,
    /// A set, or a call, or a group, without its end.
    #[error("expected {0}")]
    ExpectedClosing(char),
    /// A label without a comparison after it.
    #[error("expected a comparison after the label")]
    ExpectedOperator,
    /// `has()` without the name of a label.
    #[error("expected the name of a label")]
    ExpectedLabel,
    /// The name of a label has more than 512 characters.
    #[error("a label has at most {MAX_LABEL} characters")]
    LabelTooLong,
    /// The whole is longer than [`super::MAX_LENGTH`].
    #[error("longer than {} bytes", super::MAX_LENGTH)]
    TooLong,
    /// Parentheses in parentheses, more than [`super::MAX_DEPTH`] of them.
    #[error("more than {} parentheses in each other", super::MAX_DEPTH)]
    TooDeep,
}

impl SelectorError {
    pub(super) fn new(position: usize, kind: SelectorErrorKind) -> Self {
        Self { position, kind }
    }

    /// Where it cannot be read: bytes from the start.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Why it cannot be read.
    pub fn kind(&self) -> SelectorErrorKind {
        self.kind
    }
}

/// Cuts a text into tokens, one at a time.
pub(super) struct Tokens<'a> {
    text: &'a str,
    position: usize,
    // After a label only an operator can follow: `in` is a label elsewhere.
    after_label: bool,
}

impl<'a> Tokens<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, position: 0, after_label: false }
    }

    /// The next token and where it starts; [`Token::End`] for ever at the end.
    pub(super) fn next(&mut self) -> Result<(usize, Token<'a>), SelectorError> {
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

    /// An operator in words. As in Calico nothing must separate it from what follows: `a in{'b'}`.
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

    /// The name of a label at this place, possibly empty.
    fn label(&mut self) -> Result<&'a str, SelectorError> {
        let rest = self.rest();
        let of_label = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '-');
        let length = rest.find(|c| !of_label(c)).unwrap_or(rest.len());
        if length > MAX_LABEL {
            return self.error(SelectorErrorKind::LabelTooLong);
        }
        self.position += length;
        Ok(rest.get(..length).unwrap_or(""))
    }
}
