use fancy_regex::Regex;

use super::Place;

/// The part of a layer that stays on its device when the rest overflows (`common/fit.cpp`, `common_layer_fraction_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fraction {
    /// Attention.
    Attention,
    /// Attention and up.
    Up,
    /// Attention, up and gate.
    Gate,
    /// All but the experts.
    Moe,
}

impl Fraction {
    /// What follows the layer in the pattern of the tensors that overflow.
    pub fn pattern(self) -> &'static str {
        match self {
            Fraction::Attention => r"ffn_(gate|up|gate_up|down).*",
            Fraction::Up => r"ffn_(gate|gate_up|down).*",
            Fraction::Gate => r"ffn_down.*",
            Fraction::Moe => r"ffn_(up|down|gate_up|gate)_(ch|)exps",
        }
    }

    /// Whether [`Fraction::pattern`] matches the beginning of a name's part after `blk.N.`.
    fn overflows(self, part: &str) -> bool {
        let Some(kind) = part.strip_prefix("ffn_") else {
            return false;
        };
        let starts = |names: &[&str]| names.iter().any(|n| kind.starts_with(n));
        match self {
            Fraction::Attention => starts(&["gate", "up", "down"]),
            Fraction::Up => starts(&["gate", "down"]),
            Fraction::Gate => starts(&["down"]),
            Fraction::Moe => ["up", "down", "gate_up", "gate"].iter().any(|n| {
                let rest = kind.strip_prefix(n).and_then(|r| r.strip_prefix('_'));
                rest.is_some_and(|r| r.starts_with("exps") || r.starts_with("chexps"))
            }),
        }
    }
}

/// Which tensors an override is for.
#[derive(Debug, Clone)]
pub enum Pattern {
    /// A regular expression, searched in the name.
    Regex(Box<Regex>),
    /// What the search makes: the overflow of a layer, or of all layers. The same as its regular expression, without the cost of one.
    Overflow {
        /// The layer, or all.
        layer: Option<usize>,
        /// What stays.
        fraction: Fraction,
    },
}

/// A tensor override (`-ot`).
#[derive(Debug, Clone)]
pub struct Override {
    /// Which tensors.
    pub pattern: Pattern,
    /// Where they go.
    pub place: Place,
}

impl Override {
    /// An override by a regular expression in ECMAScript's syntax, as `std::regex` reads it.
    ///
    /// # Errors
    /// Why it is no regular expression.
    pub fn regex(pattern: &str, place: Place) -> Result<Override, String> {
        let regex = Regex::new(pattern).map_err(|error| format!("{pattern:?}: {error}"))?;
        Ok(Override {
            pattern: Pattern::Regex(Box::new(regex)),
            place,
        })
    }

    /// The override of a layer's overflow.
    pub fn overflow(layer: Option<usize>, fraction: Fraction, place: Place) -> Override {
        Override {
            pattern: Pattern::Overflow { layer, fraction },
            place,
        }
    }

    /// Whether it is for a tensor of this name. A pattern that backtracks beyond all bounds matches nothing.
    pub fn matches(&self, name: &str) -> bool {
        match &self.pattern {
            Pattern::Regex(regex) => regex.is_match(name).unwrap_or(false),
            Pattern::Overflow { layer, fraction } => {
                let Some((_, rest)) = name.split_once("blk.") else {
                    return false;
                };
                let Some((number, part)) = rest.split_once('.') else {
                    return false;
                };
                let number: Option<usize> = number.parse().ok();
                let layer_matches = number.is_some_and(|n| layer.is_none_or(|l| l == n));
                layer_matches && fraction.overflows(part)
            }
        }
    }

    /// The pattern as text.
    pub fn text(&self) -> String {
        match &self.pattern {
            Pattern::Regex(regex) => regex.as_str().to_owned(),
            Pattern::Overflow { layer, fraction } => {
                let layer = layer.map_or_else(|| r"\d+".to_owned(), |il| il.to_string());
                format!(r"blk\.{layer}\.{}", fraction.pattern())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overflow_matches_what_its_text_does() {
        let names = [
            "blk.1.ffn_up.weight",
            "blk.1.ffn_up_exps.weight",
            "blk.1.ffn_gate_up_exps.weight",
            "blk.1.ffn_gate_up.weight",
            "blk.1.ffn_gate_exps.weight",
            "blk.1.ffn_gate_chexps.weight",
            "blk.1.ffn_gate_inp.weight",
            "blk.1.ffn_gate_shexp.weight",
            "blk.1.ffn_down_exps.bias",
            "blk.1.ffn_down.weight",
            "blk.1.ffn_norm.weight",
            "blk.1.attn_q.weight",
            "blk.11.ffn_down.weight",
            "blk.11.ffn_up_exps.weight",
            "enc.blk.1.ffn_down.weight",
            "output.weight",
        ];
        for fraction in [
            Fraction::Attention,
            Fraction::Up,
            Fraction::Gate,
            Fraction::Moe,
        ] {
            for layer in [None, Some(1), Some(11)] {
                let direct = Override::overflow(layer, fraction, Place::Host);
                let regex = Override::regex(&direct.text(), Place::Host).unwrap();
                for name in names {
                    assert_eq!(
                        direct.matches(name),
                        regex.matches(name),
                        "{} {name}",
                        direct.text()
                    );
                }
            }
        }
    }
}
