//! The patterns that the OpenAPI document states are what the checks let pass.

use regex::Regex;
use sandkeep_model::{
    Audience, FILES_KEY_PATTERN, Label, LimitsWish, MODE_PATTERN, PLAIN_PATTERN,
    POINT_NAME_PATTERN, PageToken, PointId, Recipe, SandboxId, SecretName, Step, TemplateName,
    Timestamp, TokenName, check_files_key, check_point_name,
};

/// Texts of many lengths, with each character of ASCII at the beginning, within and at the end.
fn samples() -> Vec<String> {
    let mut all = vec![String::new(), "\u{e9}".to_owned(), "caf\u{e9}".to_owned()];
    for fill in ["a", "0", "7", "f"] {
        for length in [1, 2, 3, 4, 5, 20, 21, 22, 63, 64, 65, 127, 128] {
            all.push(fill.repeat(length));
        }
        for around in [3, 21, 64] {
            for character in (0..128_u8).map(char::from) {
                for at in [0, 1, around - 1] {
                    let (before, behind) = (fill.repeat(at), fill.repeat(around - 1 - at));
                    all.push(format!("{before}{character}{behind}"));
                }
            }
        }
    }
    all
}

fn agree(pattern: &str, passes: impl Fn(&str) -> bool) {
    let stated = Regex::new(pattern).expect("a stated pattern is a regular expression");
    let mut passed = 0;
    for text in samples() {
        assert_eq!(stated.is_match(&text), passes(&text), "{pattern}: {text:?}");
        passed += usize::from(passes(&text));
    }
    assert!(passed > 2, "{pattern} lets nothing pass that is tried");
}

#[test]
fn names_that_pass_are_those_of_the_pattern() {
    agree(TemplateName::PATTERN, |text| {
        text.parse::<TemplateName>().is_ok()
    });
    agree(SecretName::PATTERN, |text| {
        text.parse::<SecretName>().is_ok()
    });
    agree(TokenName::PATTERN, |text| text.parse::<TokenName>().is_ok());
    agree(POINT_NAME_PATTERN, |text| {
        check_point_name("tag", text).is_ok()
    });
    agree(PointId::PATTERN, |text| text.parse::<PointId>().is_ok());
    // A name is found as a name: one that is an id would never be.
    for text in samples() {
        assert_eq!(
            check_point_name("name", &text).is_ok(),
            check_point_name("tag", &text).is_ok() && text.parse::<PointId>().is_err(),
            "{text:?}"
        );
    }
    agree(PLAIN_PATTERN, |text| text.parse::<Audience>().is_ok());
    agree(PLAIN_PATTERN, |text| text.parse::<Label>().is_ok());
    agree(FILES_KEY_PATTERN, |text| check_files_key(text).is_ok());
    agree(MODE_PATTERN, |text| {
        let step = Step::Copy {
            from: "a".to_owned(),
            to: "/b".to_owned(),
            user: None,
            mode: Some(text.to_owned()),
            files: "0".repeat(64),
        };
        let recipe = Recipe {
            isolation_minimum: None,
            from: "base".parse().unwrap(),
            steps: vec![step],
            start: None,
            ready: None,
            after_restore: None,
            limits: LimitsWish::default(),
            isolation: Vec::new(),
        };
        recipe.check().is_ok()
    });
}

/// Paths of E2B may have more behind an id, so more is read than is stated.
#[test]
fn ids_and_tokens_of_pages_have_the_pattern() {
    let (id, token) = (
        Regex::new(SandboxId::PATTERN).unwrap(),
        Regex::new(PageToken::PATTERN).unwrap(),
    );
    for text in samples() {
        let stated = id.is_match(&text);
        assert!(!stated || text.parse::<SandboxId>().is_ok(), "{text:?}");
        let token = format!("1.{text}");
        assert!(!stated || token.parse::<PageToken>().is_ok(), "{token:?}");
    }
    for _ in 0..100 {
        let made = SandboxId::random();
        assert!(id.is_match(made.as_str()));
        let next = PageToken {
            started_at: Timestamp::from_millis(1_795_000_000_000),
            id: made,
        };
        assert!(token.is_match(&next.to_string()), "{next}");
    }
}
