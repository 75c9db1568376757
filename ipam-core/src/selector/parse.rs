//! From tokens to a selector.

use std::collections::BTreeSet;

use super::Node;
use super::token::{SelectorError, SelectorErrorKind, Token, Tokens};

/// How long a selector may be, in bytes.
pub const MAX_LENGTH: usize = 64 * 1024;

/// How many parentheses may stand in each other. Reading, showing and matching need stack in proportion.
pub const MAX_DEPTH: usize = 100;

pub(super) fn parse(text: &str) -> Result<Node, SelectorError> {
    if text.len() > MAX_LENGTH {
        return Err(SelectorError::new(MAX_LENGTH, SelectorErrorKind::TooLong));
    }
    let mut parser = Parser::new(text)?;
    if parser.token == Token::End {
        return Ok(Node::All);
    }
    let root = parser.any_of()?;
    if parser.token == Token::End { Ok(root) } else { parser.error(SelectorErrorKind::Unexpected) }
}

/// Reads with one token ahead.
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

    /// Takes the token and reads the next one.
    fn advance(&mut self) -> Result<Token<'a>, SelectorError> {
        let (position, next) = self.tokens.next()?;
        self.position = position;
        Ok(std::mem::replace(&mut self.token, next))
    }

    /// An error at the token that was not taken; at the end of the text, the error is that end.
    fn error<T>(&self, kind: SelectorErrorKind) -> Result<T, SelectorError> {
        Err(SelectorError::new(self.position, kind))
    }

    /// `x || y || ...`
    fn any_of(&mut self) -> Result<Node, SelectorError> {
        let mut parts = vec![self.all_of()?];
        while self.token == Token::Or {
            self.advance()?;
            parts.push(self.all_of()?);
        }
        Ok(one_or(parts, Node::Or))
    }

    /// `x && y && ...`
    fn all_of(&mut self) -> Result<Node, SelectorError> {
        let mut parts = vec![self.negatable()?];
        while self.token == Token::And {
            self.advance()?;
            parts.push(self.negatable()?);
        }
        Ok(one_or(parts, Node::And))
    }

    /// `!!...x`: an even number of `!` is none.
    fn negatable(&mut self) -> Result<Node, SelectorError> {
        let mut negated = false;
        while self.token == Token::Not {
            self.advance()?;
            negated = !negated;
        }
        let inner = self.operand()?;
        Ok(if negated { Node::Not(Box::new(inner)) } else { inner })
    }

    fn operand(&mut self) -> Result<Node, SelectorError> {
        match self.token {
            Token::LeftParen => self.group(),
            Token::All => self.advance().map(|_| Node::All),
            Token::Global => self.advance().map(|_| Node::Global),
            Token::Has(key) => self.advance().map(|_| Node::Has(key.to_owned())),
            Token::Label(key) => {
                self.advance()?;
                self.comparison(key)
            }
            Token::End => self.error(SelectorErrorKind::UnexpectedEnd),
            _ => self.error(SelectorErrorKind::Unexpected),
        }
    }

    fn group(&mut self) -> Result<Node, SelectorError> {
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

    fn comparison(&mut self, key: &str) -> Result<Node, SelectorError> {
        let key = key.to_owned();
        match self.token {
            Token::Compare(comparison) => {
                self.advance()?;
                let Token::Text(text) = self.token else { return self.error(SelectorErrorKind::ExpectedString) };
                self.advance()?;
                Ok(Node::Compare(key, comparison, text.to_owned()))
            }
            Token::In => {
                self.advance()?;
                Ok(Node::In(key, self.set()?))
            }
            Token::NotIn => {
                self.advance()?;
                Ok(Node::NotIn(key, self.set()?))
            }
            _ => self.error(SelectorErrorKind::ExpectedOperator),
        }
    }

    /// `{'a', 'b'}`; it may be empty, and a comma may stand before its end.
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

/// The only part, or all of them joined.
fn one_or(mut parts: Vec<Node>, join: impl FnOnce(Vec<Node>) -> Node) -> Node {
    match parts.pop() {
        Some(only) if parts.is_empty() => only,
        Some(last) => {
            parts.push(last);
            join(parts)
        }
        None => join(parts),
    }
}
