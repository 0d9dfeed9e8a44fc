use std::collections::HashMap;

use super::{ArchError, MAX_DIM};
use crate::gguf::{Header, Kv, ValueType};

/// Longer arrays are token lists, of which only the length matters.
const MAX_ARRAY: u64 = 4096;

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any integer type, and booleans as 0 and 1.
    Int(i128),
    /// Any float type.
    Float(f64),
    /// A string.
    Str(String),
    /// An array of integers or booleans.
    Ints(Vec<i128>),
    /// An array of floats.
    Floats(Vec<f64>),
    /// An array of another type, or a long one: its length.
    Array(u64),
}

/// The key-values of a header, looked up by the name without the architecture's prefix.
#[derive(Debug, Clone)]
pub struct Keys {
    arch: String,
    values: HashMap<String, Value>,
}

impl Keys {
    /// Reads all keys of the (first) header.
    ///
    /// # Errors
    /// Without `general.architecture`.
    pub fn new(header: &Header) -> Result<Keys, ArchError> {
        let name = "general.architecture";
        let arch = header
            .get(name.as_bytes())
            .ok_or_else(|| ArchError::Missing(name.to_owned()))?;
        let arch = arch.str_bytes().ok_or_else(|| ArchError::Type {
            key: name.to_owned(),
            wanted: "a string",
        })?;
        let values = header
            .kvs()
            .filter_map(|kv| Some((String::from_utf8_lossy(kv.key).into_owned(), value(&kv)?)));
        Ok(Keys {
            arch: String::from_utf8_lossy(arch).into_owned(),
            values: values.collect(),
        })
    }

    /// The architecture's name.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// The full name of a key of the architecture.
    pub fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    /// The value of `{arch}.key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(&self.full(key))
    }

    /// The value of a key without the architecture's prefix.
    pub fn global(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// An unsigned integer, if the key is there.
    ///
    /// # Errors
    /// When it is another type, negative, or too large.
    pub fn opt(&self, key: &str) -> Result<Option<u64>, ArchError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Int(i)) => self.dim(key, *i, u64::from(u32::MAX)).map(Some),
            Some(_) => Err(self.wrong(key, "an integer")),
        }
    }

    /// An unsigned integer that the architecture needs.
    ///
    /// # Errors
    /// As [`Keys::opt`], and when the key is missing.
    pub fn need(&self, key: &str) -> Result<u64, ArchError> {
        self.opt(key)?
            .ok_or_else(|| ArchError::Missing(self.full(key)))
    }

    /// A dimension of tensors, if the key is there: at most [`MAX_DIM`].
    ///
    /// # Errors
    /// As [`Keys::opt`].
    pub fn opt_dim(&self, key: &str) -> Result<Option<u64>, ArchError> {
        let value = self.opt(key)?;
        value.map(|v| self.dim(key, v.into(), MAX_DIM)).transpose()
    }

    /// A dimension that the architecture needs.
    ///
    /// # Errors
    /// As [`Keys::need`].
    pub fn need_dim(&self, key: &str) -> Result<u64, ArchError> {
        self.opt_dim(key)?
            .ok_or_else(|| ArchError::Missing(self.full(key)))
    }

    /// One value per layer: an array of at least `n`, or one value for all. `None` when the key is missing.
    ///
    /// # Errors
    /// When it is another type, a value is too large, or the array is too short.
    pub fn per_layer(&self, key: &str, n: usize) -> Result<Option<Vec<u64>>, ArchError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Int(i)) => Ok(Some(vec![self.dim(key, *i, MAX_DIM)?; n])),
            Some(Value::Ints(list)) if list.len() >= n => {
                let list = list.iter().take(n);
                list.map(|i| self.dim(key, *i, MAX_DIM))
                    .collect::<Result<_, _>>()
                    .map(Some)
            }
            Some(_) => Err(self.wrong(key, "an integer or an array of one per layer")),
        }
    }

    /// A number, if the key is there and is one.
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            Value::Float(f) => Some(*f),
            Value::Int(i) => Some(*i as f64),
            _ => None,
        }
    }

    /// A boolean, if the key is there and is one.
    pub fn flag(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Int(i) => Some(*i != 0),
            _ => None,
        }
    }

    /// A string, if the key is there and is one.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::Str(s) => Some(s),
            _ => None,
        }
    }

    /// An array of integers or booleans, if the key is there and is one.
    pub fn ints(&self, key: &str) -> Option<&[i128]> {
        match self.get(key)? {
            Value::Ints(list) => Some(list),
            _ => None,
        }
    }

    /// An array of floats, if the key is there and is one.
    pub fn floats(&self, key: &str) -> Option<&[f64]> {
        match self.get(key)? {
            Value::Floats(list) => Some(list),
            _ => None,
        }
    }

    fn dim(&self, key: &str, value: i128, max: u64) -> Result<u64, ArchError> {
        u64::try_from(value)
            .ok()
            .filter(|&v| v <= max)
            .ok_or_else(|| ArchError::Range {
                key: self.full(key),
                value: value.to_string(),
            })
    }

    fn wrong(&self, key: &str, wanted: &'static str) -> ArchError {
        ArchError::Type {
            key: self.full(key),
            wanted,
        }
    }
}

fn value(kv: &Kv<'_>) -> Option<Value> {
    match kv.ty {
        ValueType::F32 => {
            let f = f32::from_le_bytes(kv.value.try_into().ok()?);
            Some(Value::Float(f.into()))
        }
        ValueType::F64 => Some(Value::Float(f64::from_le_bytes(kv.value.try_into().ok()?))),
        ValueType::Bool => Some(Value::Int(i128::from(kv.value.first() != Some(&0)))),
        ValueType::String => kv
            .str_bytes()
            .map(|s| Value::Str(String::from_utf8_lossy(s).into_owned())),
        ValueType::Array => array(kv),
        _ => kv.int().map(Value::Int),
    }
}

fn array(kv: &Kv<'_>) -> Option<Value> {
    let (ty, n) = kv.array()?;
    let width = match ty {
        ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
        ValueType::U16 | ValueType::I16 => 2,
        ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
        ValueType::U64 | ValueType::I64 | ValueType::F64 => 8,
        _ => return Some(Value::Array(n)),
    };
    if n > MAX_ARRAY {
        return Some(Value::Array(n));
    }
    let items = kv.value.get(12..)?.chunks_exact(width);
    if matches!(ty, ValueType::F32 | ValueType::F64) {
        let floats = items.map(|value| match value.len() {
            4 => Some(f32::from_le_bytes(value.try_into().ok()?).into()),
            _ => Some(f64::from_le_bytes(value.try_into().ok()?)),
        });
        return floats.collect::<Option<_>>().map(Value::Floats);
    }
    let ty = if ty == ValueType::Bool {
        ValueType::U8
    } else {
        ty
    };
    items
        .map(|value| Kv { ty, value, ..*kv }.int())
        .collect::<Option<_>>()
        .map(Value::Ints)
}
