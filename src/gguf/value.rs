use super::{KvBytes, ValueType};

/// A value to be written: its type, and its bytes as they stand in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    ty: ValueType,
    bytes: Vec<u8>,
}

impl Value {
    /// An integer. `None` when `ty` is no integer type or cannot hold it.
    pub fn int(ty: ValueType, value: i128) -> Option<Value> {
        use ValueType::*;
        let bytes = match ty {
            U8 => u8::try_from(value).ok()?.to_le_bytes().to_vec(),
            U16 => u16::try_from(value).ok()?.to_le_bytes().to_vec(),
            U32 => u32::try_from(value).ok()?.to_le_bytes().to_vec(),
            U64 => u64::try_from(value).ok()?.to_le_bytes().to_vec(),
            I8 => i8::try_from(value).ok()?.to_le_bytes().to_vec(),
            I16 => i16::try_from(value).ok()?.to_le_bytes().to_vec(),
            I32 => i32::try_from(value).ok()?.to_le_bytes().to_vec(),
            I64 => i64::try_from(value).ok()?.to_le_bytes().to_vec(),
            F32 | F64 | Bool | String | Array => return None,
        };
        Some(Value { ty, bytes })
    }

    /// A floating-point number, rounded to `ty`. `None` when `ty` is none, or a finite number becomes infinite in it.
    pub fn float(ty: ValueType, value: f64) -> Option<Value> {
        let bytes = match ty {
            ValueType::F32 => {
                #[allow(clippy::cast_possible_truncation, reason = "rounding is meant")]
                let single = value as f32;
                if single.is_infinite() && value.is_finite() {
                    return None;
                }
                single.to_le_bytes().to_vec()
            }
            ValueType::F64 => value.to_le_bytes().to_vec(),
            _ => return None,
        };
        Some(Value { ty, bytes })
    }

    /// True or false.
    pub fn bool(value: bool) -> Value {
        Value {
            ty: ValueType::Bool,
            bytes: vec![value.into()],
        }
    }

    /// A string; llama.cpp wants UTF-8, the format does not.
    pub fn string(text: &[u8]) -> Value {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(text);
        Value {
            ty: ValueType::String,
            bytes,
        }
    }

    /// An array. `None` when `values` are not all of type `element`, or `element` is itself an array.
    pub fn array(element: ValueType, values: &[Value]) -> Option<Value> {
        if element == ValueType::Array || values.iter().any(|v| v.ty != element) {
            return None;
        }
        let mut bytes = element.raw().to_le_bytes().to_vec();
        bytes.extend_from_slice(&(values.len() as u64).to_le_bytes());
        values
            .iter()
            .for_each(|v| bytes.extend_from_slice(&v.bytes));
        Some(Value {
            ty: ValueType::Array,
            bytes,
        })
    }

    /// The type.
    pub fn ty(&self) -> ValueType {
        self.ty
    }

    /// The value as it stands in a file; strings and arrays with their length prefix.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The whole entry of a key with this value.
    pub fn entry(&self, key: &[u8]) -> KvBytes {
        let mut out = (key.len() as u64).to_le_bytes().to_vec();
        out.extend_from_slice(key);
        out.extend_from_slice(&self.ty.raw().to_le_bytes());
        out.extend_from_slice(&self.bytes);
        out
    }
}
