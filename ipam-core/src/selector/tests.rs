//! Tests the selector language with fixed cases and with random input.

use proptest::prelude::*;

use super::*;

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn selectors_match() {
    let none = labels(&[]);
    let ab = labels(&[("a", "b")]);
    let more = labels(&[("a", "value"), ("kubernetes.io/host-name_1", "x"), ("in", "y"), ("q", "it's")]);
    for (text, labels, expected) in [
        ("", &none, true),
        (" \t ", &none, true),
        ("all()", &none, true),
        ("all( )", &none, true),
        ("global()", &none, true),
        ("!all()", &none, false),
        ("has(a)", &none, false),
        ("has( a\t)", &ab, true),
        ("a == 'b'", &ab, true),
        ("a=='b'", &ab, true),
        (r#"a == "b""#, &ab, true),
        ("a == 'B'", &ab, false),
        ("a == 'b'", &none, false),
        ("a != 'b'", &ab, false),
        ("a != 'c'", &ab, true),
        ("a != 'b'", &none, true),
        ("a in {'b', 'c'}", &ab, true),
        ("a in{'b'}", &ab, true),
        ("a in {}", &ab, false),
        ("a in {'c'}", &none, false),
        ("a not in {'b','c',}", &ab, false),
        ("a notin {'c'}", &ab, true),
        ("a not  in {'b'}", &none, true),
        ("a contains 'alu'", &more, true),
        ("a contains ''", &none, false),
        ("a starts with 'val'", &more, true),
        ("a starts  with 'alu'", &more, false),
        ("a ends with 'lue'", &more, true),
        ("a endswith 'val'", &more, false),
        ("kubernetes.io/host-name_1 == 'x'", &more, true),
        ("in == 'y'", &more, true),
        (r#"q == "it's""#, &more, true),
        ("!a == 'b'", &ab, false),
        ("!!has(a)", &ab, true),
        ("! ! ! has(a)", &ab, false),
        ("has(x) && has(y) || has(a)", &ab, true),
        ("has(a) || has(x) && has(y)", &ab, true),
        ("(has(a) || has(x)) && has(y)", &ab, false),
        ("!(a == 'b')", &ab, false),
        ("!(a == 'c' || has(x))", &ab, true),
        ("((((has(a)))))", &ab, true),
    ] {
        let selector: Selector = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(selector.matches(labels), expected, "{text}");
    }
}

#[test]
fn selector_errors_are_told_with_place() {
    use SelectorErrorKind::*;
    for (text, position, kind) in [
        ("a", 1, ExpectedOperator),
        ("a = 'b'", 2, ExpectedOperator),
        ("a ==", 4, ExpectedString),
        ("a == b", 5, ExpectedString),
        ("a == 'b", 5, UnterminatedString),
        ("a == 'b' c", 9, Unexpected),
        ("a == 'b' && ", 12, UnexpectedEnd),
        ("a & b", 2, ExpectedOperator),
        ("has(a) & has(b)", 7, Unexpected),
        ("has(a) has(b)", 7, Unexpected),
        ("has()", 5, ExpectedLabel),
        ("has(a", 5, ExpectedClosing(')')),
        ("has (a)", 4, ExpectedOperator),
        ("all(a)", 4, ExpectedClosing(')')),
        ("(has(a)", 7, ExpectedClosing(')')),
        ("has(a))", 6, Unexpected),
        ("()", 1, Unexpected),
        ("a in 'b'", 5, ExpectedSet),
        ("a in {'b'", 9, ExpectedClosing('}')),
        ("a in {'b' 'c'}", 10, ExpectedClosing('}')),
        ("a not 'b'", 2, ExpectedOperator),
        ("a starts 'b'", 2, ExpectedOperator),
        ("\u{e4} == 'b'", 0, Unexpected),
        ("a == 'b'\n", 8, Unexpected),
        ("!", 1, UnexpectedEnd),
    ] {
        let error = text.parse::<Selector>().unwrap_err();
        assert_eq!((error.position(), error.kind()), (position, kind), "{text}");
    }
    assert_eq!(
        "a == 'b".parse::<Selector>().unwrap_err().to_string(),
        "invalid selector: unterminated string at position 5"
    );
}

#[test]
fn selector_errors_are_bounded_for_garbage() {
    use SelectorErrorKind::*;
    let kind = |text: String| text.parse::<Selector>().map(|_| ()).map_err(|error| error.kind());
    let nested = |depth: usize| "(".repeat(depth) + "all()" + &")".repeat(depth);
    assert_eq!(kind("(".repeat(100_000)), Err(TooLong));
    assert_eq!(kind("(".repeat(60_000)), Err(TooDeep));
    assert_eq!(kind(nested(MAX_DEPTH)), Ok(()));
    assert_eq!(kind(nested(MAX_DEPTH + 1)), Err(TooDeep));
    assert_eq!(kind("!(".repeat(MAX_DEPTH) + "all()" + &")".repeat(MAX_DEPTH)), Ok(()));
    assert_eq!(kind("!".repeat(60_000) + "all()"), Ok(()));
    assert_eq!(kind("all()&&".repeat(9_000) + "all()"), Ok(()));
    assert_eq!(kind(format!("{} == 'b'", "a".repeat(512))), Ok(()));
    assert_eq!(kind(format!("{} == 'b'", "a".repeat(513))), Err(LabelTooLong));
}

/// A displayed selector has no redundant parentheses, because with them the nesting could exceed [`MAX_DEPTH`].
#[test]
fn selector_is_shown_no_deeper_than_read() {
    for (left, right) in [("(", " && has(b) || has(c))"), ("(!", " && has(b))"), ("!(has(b) && ", ")"), ("!(!(", "))")]
    {
        let opened = left.matches('(').count();
        let text = left.repeat(MAX_DEPTH / opened) + "has(a)" + &right.repeat(MAX_DEPTH / opened);
        let selector: Selector = text.parse().unwrap();
        assert_eq!(selector.to_string().parse(), Ok(selector), "{left}...{right}");
    }
}

fn text() -> impl Strategy<Value = String> {
    // Each generated string contains at most one kind of quotes, like the strings of a parsed selector.
    prop_oneof!["[a-z \u{e4}\"&|]{0,6}", "[a-z \u{e4}'(){}]{0,6}"]
}

fn node() -> impl Strategy<Value = Expression> {
    let key = || prop_oneof!["[a-zA-Z0-9_./-]{1,8}", "(in|not|has|all|contains|starts|global)"];
    let comparison = prop_oneof![
        Just(Comparison::Equal),
        Just(Comparison::NotEqual),
        Just(Comparison::Contains),
        Just(Comparison::StartsWith),
        Just(Comparison::EndsWith),
    ];
    let set = || prop::collection::btree_set(text(), 0..4);
    let leaf = prop_oneof![
        Just(Expression::All),
        Just(Expression::Global),
        key().prop_map(Expression::Has),
        (key(), comparison, text()).prop_map(|(key, comparison, text)| Expression::Compare(key, comparison, text)),
        (key(), set()).prop_map(|(key, texts)| Expression::In(key, texts)),
        (key(), set()).prop_map(|(key, texts)| Expression::NotIn(key, texts)),
    ];
    leaf.prop_recursive(5, 40, 4, |inner| {
        prop_oneof![
            inner.clone().prop_map(|node| Expression::Not(Box::new(node))),
            prop::collection::vec(inner.clone(), 2..4).prop_map(Expression::And),
            prop::collection::vec(inner, 2..4).prop_map(Expression::Or),
        ]
    })
}

proptest! {
    #[test]
    fn selector_is_read_back_as_shown(root in node()) {
        let selector = Selector { root };
        prop_assert_eq!(selector.to_string().parse::<Selector>(), Ok(selector));
    }

    #[test]
    fn selector_never_panics_on_garbage(text in ".{0,80}") {
        let _ = text.parse::<Selector>();
    }

    #[test]
    fn selector_never_panics_on_near_misses(text in "[ab'\"(){},!=&| \t]{0,40}|(has\\(|all\\(|a |in |not |'b'|==|\\)|\\{|\\}|&&|!){0,20}") {
        if let Ok(selector) = text.parse::<Selector>() {
            prop_assert_eq!(selector.to_string().parse::<Selector>(), Ok(selector));
        }
    }
}
