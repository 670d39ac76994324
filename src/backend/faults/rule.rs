//! One rule of a drill: its form outside (JSON, TOML) and inside.

use crate::model::Step;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;
use thiserror::Error;

/// All rules: the body of `PUT /v1/faults`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleSet {
    /// The first rule that strikes decides.
    pub rules: Vec<Rule>,
}

/// Which calls are hit, how often, and what happens to them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawRule", into = "RawRule")]
pub struct Rule {
    /// The step; `None` is every step.
    pub step: Option<Step>,
    /// A glob (`*`, `?`) for the name of the object; probes and connects have none.
    pub name: String,
    /// A glob for the domain.
    pub domain: String,
    /// What happens.
    pub action: Action,
    /// Only that many matching calls, the first ones.
    pub count: Option<u32>,
    /// How likely a matching call is hit, 0 to 1.
    pub probability: f64,
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It hangs until the rules are cleared, then does its work.
    Hang,
    /// It begins so much later.
    Delay(Duration),
    /// It fails with that errno and does nothing.
    Error(i32),
    /// It does its work and answers so much later.
    LateOk(Duration),
    /// It does half of its work, then hangs until the rules are cleared.
    Half,
    /// It panics.
    Panic,
}

/// Why a rule is refused.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum BadRule {
    /// No such step.
    #[error(
        "step {0:?} is not one; use \"*\", {words}",
        words = Step::ALL.map(Step::as_str).join(", ")
    )]
    Step(String),
    /// No such action.
    #[error("action {0:?} is not one; use hang, delay, error, late-ok, half or panic")]
    Action(String),
    /// A field that this action needs.
    #[error("action {action:?} needs the field {field:?}, such as {example}")]
    Missing {
        /// The action.
        action: String,
        /// The field.
        field: &'static str,
        /// How it may look.
        example: &'static str,
    },
    /// A field that this action has no use for.
    #[error("action {action:?} has no field {field:?}; leave it out")]
    Needless {
        /// The action.
        action: String,
        /// The field.
        field: &'static str,
    },
    /// Not a duration.
    #[error("for {0:?} is no duration; use one such as \"500ms\", \"30s\" or \"5m\"")]
    For(String),
    /// Not an errno.
    #[error("errno {0} is none; use a number from 1 to 4095, such as 5 (EIO) or 28 (ENOSPC)")]
    Errno(i64),
    /// Not a probability.
    #[error("probability {0} is none; use a number above 0 and up to 1")]
    Probability(f64),
    /// A rule that can't strike.
    #[error("count 0 never strikes; use 1 or more, or leave it out for every call")]
    Count,
    /// Too long a pattern.
    #[error("{field} is {length} bytes long; a pattern has at most {GLOB_MAX}")]
    Glob {
        /// `name` or `domain`.
        field: &'static str,
        /// Its length.
        length: usize,
    },
}

/// The longest pattern in bytes.
const GLOB_MAX: usize = 256;

/// The rule as it is written.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    #[serde(default = "any")]
    step: String,
    #[serde(default = "any")]
    name: String,
    #[serde(default = "any")]
    domain: String,
    action: String,
    #[serde(default, rename = "for", skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    errno: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<u32>,
    #[serde(default = "always")]
    probability: f64,
}

fn any() -> String {
    "*".to_owned()
}

fn always() -> f64 {
    1.0
}

impl TryFrom<RawRule> for Rule {
    type Error = BadRule;

    fn try_from(raw: RawRule) -> Result<Rule, BadRule> {
        let step = match raw.step.as_str() {
            "*" => None,
            word => Some(Step::parse(word).ok_or_else(|| BadRule::Step(word.to_owned()))?),
        };
        for (field, glob) in [("name", &raw.name), ("domain", &raw.domain)] {
            if glob.len() > GLOB_MAX {
                let length = glob.len();
                return Err(BadRule::Glob { field, length });
            }
        }
        if raw.count == Some(0) {
            return Err(BadRule::Count);
        }
        if !(raw.probability > 0.0 && raw.probability <= 1.0) {
            return Err(BadRule::Probability(raw.probability));
        }
        let action = raw.action()?;
        Ok(Rule {
            step,
            name: raw.name,
            domain: raw.domain,
            action,
            count: raw.count,
            probability: raw.probability,
        })
    }
}

impl RawRule {
    fn action(&self) -> Result<Action, BadRule> {
        let (action, uses_time, uses_errno) = match self.action.as_str() {
            "hang" => (Action::Hang, false, false),
            "half" => (Action::Half, false, false),
            "panic" => (Action::Panic, false, false),
            "delay" => (Action::Delay(self.time()?), true, false),
            "late-ok" => (Action::LateOk(self.time()?), true, false),
            "error" => (Action::Error(self.errno()?), false, true),
            other => return Err(BadRule::Action(other.to_owned())),
        };
        let needless = |field| BadRule::Needless {
            action: self.action.clone(),
            field,
        };
        if self.time.is_some() && !uses_time {
            return Err(needless("for"));
        }
        if self.errno.is_some() && !uses_errno {
            return Err(needless("errno"));
        }
        Ok(action)
    }

    fn time(&self) -> Result<Duration, BadRule> {
        let text = self.time.as_deref().ok_or_else(|| BadRule::Missing {
            action: self.action.clone(),
            field: "for",
            example: "\"30s\"",
        })?;
        text.parse::<jiff::SignedDuration>()
            .ok()
            .and_then(|time| Duration::try_from(time).ok())
            .ok_or_else(|| BadRule::For(text.to_owned()))
    }

    fn errno(&self) -> Result<i32, BadRule> {
        let number = self.errno.ok_or_else(|| BadRule::Missing {
            action: self.action.clone(),
            field: "errno",
            example: "5",
        })?;
        // 4095 is the largest errno that a Linux system call can return.
        i32::try_from(number)
            .ok()
            .filter(|errno| (1..=4095).contains(errno))
            .ok_or(BadRule::Errno(number))
    }
}

impl From<Rule> for RawRule {
    fn from(rule: Rule) -> RawRule {
        let show = |time: Duration| {
            let time = jiff::SignedDuration::try_from(time).unwrap_or(jiff::SignedDuration::MAX);
            format!("{time:#}")
        };
        let (action, time, errno) = match rule.action {
            Action::Hang => ("hang", None, None),
            Action::Delay(time) => ("delay", Some(show(time)), None),
            Action::Error(errno) => ("error", None, Some(i64::from(errno))),
            Action::LateOk(time) => ("late-ok", Some(show(time)), None),
            Action::Half => ("half", None, None),
            Action::Panic => ("panic", None, None),
        };
        RawRule {
            step: rule.step.map_or("*", Step::as_str).to_owned(),
            name: rule.name,
            domain: rule.domain,
            action: action.to_owned(),
            time,
            errno,
            count: rule.count,
            probability: rule.probability,
        }
    }
}

impl Rule {
    /// A rule for every call of a step (`None`: of any step), whatever the name and domain.
    #[must_use]
    pub fn new(step: Option<Step>, action: Action) -> Rule {
        Rule {
            step,
            name: any(),
            domain: any(),
            action,
            count: None,
            probability: 1.0,
        }
    }

    /// Whether it is about such a call, its count and probability aside.
    #[must_use]
    pub fn matches(&self, step: Step, name: &str, domain: &str) -> bool {
        self.step.is_none_or(|own| own == step)
            && glob(&self.name, name)
            && glob(&self.domain, domain)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.step.map_or("*", Step::as_str);
        write!(f, "{step} of {} in {}", self.name, self.domain)
    }
}

/// Whether a text matches a pattern of literal characters, `*` (any, also none) and `?` (one).
/// Takes at most pattern × text steps, so no pattern can stall a call.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to go on when what follows the last `*` doesn't fit.
    let mut back: Option<(usize, usize)> = None;
    while t < text.len() {
        if p < pattern.len() && pattern[p] == b'*' {
            back = Some((p, t));
            p += 1;
        } else if p < pattern.len() && (pattern[p] == b'?' || pattern[p] == text[t]) {
            p += 1;
            t += 1;
        } else if let Some((star, from)) = back {
            back = Some((star, from + 1));
            p = star + 1;
            t = from + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(json: &str) -> Result<Rule, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    #[test]
    fn the_rule_of_the_documentation_is_read_and_shown() {
        let text = r#"{"rules":[{"step":"trash","name":"victim-*","domain":"*","action":"hang",
            "count":15,"probability":1.0}]}"#;
        let set: RuleSet = serde_json::from_str(text).unwrap();
        assert_eq!(set.rules[0].step, Some(Step::Trash));
        assert_eq!(set.rules[0].action, Action::Hang);
        assert_eq!(set.rules[0].count, Some(15));
        let shown = serde_json::to_value(&set).unwrap();
        assert_eq!(
            shown,
            serde_json::from_str::<serde_json::Value>(text).unwrap()
        );
    }

    #[test]
    fn every_action_is_read_back() {
        for text in [
            r#"{"action":"hang"}"#,
            r#"{"step":"*","action":"delay","for":"1m30s"}"#,
            r#"{"step":"probe","action":"error","errno":110}"#,
            r#"{"step":"create","action":"late-ok","for":"250ms"}"#,
            r#"{"action":"half","name":"a?","domain":"fast"}"#,
            r#"{"action":"panic","probability":0.25}"#,
        ] {
            let first = rule(text).unwrap();
            let again = rule(&serde_json::to_string(&first).unwrap()).unwrap();
            assert_eq!(first, again, "{text}");
        }
        let delay = rule(r#"{"action":"delay","for":"1m30s"}"#).unwrap();
        assert_eq!(delay.action, Action::Delay(Duration::from_secs(90)));
    }

    #[test]
    fn a_refusal_names_the_field() {
        for (text, words) in [
            (r#"{"action":"hang","nmae":"x"}"#, "nmae"),
            (r#"{"action":"explode"}"#, "explode"),
            (r#"{"action":"hang","step":"creates"}"#, "creates"),
            (r#"{"action":"delay"}"#, "\"for\""),
            (r#"{"action":"delay","for":"soon"}"#, "soon"),
            (r#"{"action":"delay","for":"-5s"}"#, "-5s"),
            (r#"{"action":"error"}"#, "\"errno\""),
            (r#"{"action":"error","errno":-5}"#, "-5"),
            (r#"{"action":"error","errno":4096}"#, "4096"),
            (r#"{"action":"hang","for":"5s"}"#, "\"for\""),
            (r#"{"action":"panic","errno":5}"#, "\"errno\""),
            (r#"{"action":"hang","count":0}"#, "count 0"),
            (r#"{"action":"hang","probability":0}"#, "probability 0"),
            (r#"{"action":"hang","probability":1.5}"#, "1.5"),
        ] {
            let error = rule(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn globs() {
        for (pattern, text) in [
            ("*", ""),
            ("*", "a"),
            ("a*", "a"),
            ("victim-*", "victim-1"),
            ("*-1", "victim-1"),
            ("v?ctim*1", "victim-1"),
            ("*a*b*", "xxaxxbxx"),
            ("", ""),
        ] {
            assert!(glob(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [
            ("", "a"),
            ("a", ""),
            ("?", ""),
            ("victim-*", "other"),
            ("*b", "abc"),
            ("a?", "a"),
        ] {
            assert!(!glob(pattern, text), "{pattern} {text}");
        }
        // Would take for ever if it tried everything.
        assert!(!glob(&"*a".repeat(64), &"a".repeat(63)));
    }
}
