// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

// TLS is the kernel's TLS state (kTLS) of a session: the keys and record numbers of the directions handled by the
// kernel.
type TLS struct {
	Version, Cipher uint16 // numbers of linux/tls.h; 0 if the kernel has no keys
	Tx, Rx          Keys   // nil: handled by the application
	ZeroCopy        bool   // TLS_TX_ZEROCOPY_RO
	NoPad           bool   // TLS_RX_EXPECT_NO_PAD
	MaxPayload      uint16 // TLS_TX_MAX_PAYLOAD_LEN, bytes; 0: the kernel's default
}

// Keys are a direction's IV, key, salt and next record number, concatenated in the kernel's layout after struct
// tls_crypto_info. They are never printed.
type Keys []byte

// Format implements [fmt.Formatter] for every verb, without the keys.
func (Keys) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, "(keys)") }

// MarshalText implements encoding.TextMarshaler, for JSON and logs, without the keys.
func (Keys) MarshalText() ([]byte, error) { return []byte("(keys)"), nil }

const (
	tlsVersion12 = 0x0303
	tlsVersion13 = 0x0304
	maxTLSRecord = 16384 // bytes of plaintext
)

// cipher has the lengths of its key parts, in bytes.
type cipher struct {
	id                 uint16 // linux/tls.h
	name               string
	iv, key, salt, seq int
}

var ciphers = []cipher{
	{51, "AES-128-GCM", 8, 16, 4, 8},
	{52, "AES-256-GCM", 8, 32, 4, 8},
	{53, "AES-128-CCM", 8, 16, 4, 8},
	{54, "CHACHA20-POLY1305", 12, 32, 0, 8},
	{55, "SM4-GCM", 8, 16, 4, 8},
	{56, "SM4-CCM", 8, 16, 4, 8},
	{57, "ARIA-128-GCM", 8, 16, 4, 8},
	{58, "ARIA-256-GCM", 8, 32, 4, 8},
}

func findCipher(id uint16) *cipher {
	if i := slices.IndexFunc(ciphers, func(c cipher) bool { return c.id == id }); i >= 0 {
		return &ciphers[i]
	}
	return nil
}

func (c *cipher) size() int { return c.iv + c.key + c.salt + c.seq }

// configured reports whether the kernel has keys of a direction.
func (k *TLS) configured() bool { return k != nil && (k.Tx != nil || k.Rx != nil) }

// String names version and cipher, without the keys.
func (k *TLS) String() string {
	if !k.configured() {
		return "kTLS without keys"
	}
	name := fmt.Sprintf("cipher %d", k.Cipher)
	if c := findCipher(k.Cipher); c != nil {
		name = c.name
	}
	return fmt.Sprintf("TLS 1.%d with %s", int(k.Version)-0x0301, name)
}

// problem describes a contradiction that no dump produces, or returns "".
func (k *TLS) problem() string {
	if !k.configured() {
		if k.Version|k.Cipher|k.MaxPayload != 0 || k.ZeroCopy || k.NoPad {
			return "TLS without keys"
		}
		return ""
	}
	if k.Version != tlsVersion12 && k.Version != tlsVersion13 {
		return fmt.Sprintf("version %#x of TLS", k.Version)
	}
	c := findCipher(k.Cipher)
	if c == nil {
		return fmt.Sprintf("cipher %d", k.Cipher)
	}
	for _, keys := range []Keys{k.Tx, k.Rx} {
		if keys != nil && len(keys) != c.size() {
			return fmt.Sprintf("%d bytes of keys", len(keys))
		}
	}
	if k.NoPad && (k.Rx == nil || k.Version != tlsVersion13) || (k.ZeroCopy || k.MaxPayload != 0) && k.Tx == nil || k.MaxPayload > maxTLSRecord {
		return "TLS options of a direction without keys"
	}
	return ""
}

// Layout of the section: flags (1), zero (1), version (2), cipher (2), largest payload (2), keys of the
// directions that have some, checksum of the state up to here. Without the checksum only the peer would notice a
// corrupted key, by ending the session.
const (
	tlsHeadLen = 8
	tlsSumLen  = 8
)

// Bits of its flags.
const (
	tlsFlagTx = 1 << iota
	tlsFlagRx
	tlsFlagZeroCopy
	tlsFlagNoPad
	tlsFlagAll = 1<<iota - 1
)

// appendTLS appends the section to a state that starts at index start of b.
func (s *State) appendTLS(b []byte, start int) []byte {
	k := s.TLS
	if k == nil {
		return b
	}
	b = section(b, sectionTLS, tlsHeadLen+len(k.Tx)+len(k.Rx)+tlsSumLen)
	var f byte
	for i, on := range []bool{k.Tx != nil, k.Rx != nil, k.ZeroCopy, k.NoPad} {
		if on {
			f |= 1 << i
		}
	}
	b = append(b, f, 0)
	for _, v := range []uint16{k.Version, k.Cipher, k.MaxPayload} {
		b = binary.BigEndian.AppendUint16(b, v)
	}
	b = append(append(b, k.Tx...), k.Rx...)
	sum := sha256.Sum256(b[start:])
	return append(b, sum[:tlsSumLen]...)
}

// parseTLS parses the section's content. before is the state up to the section's end.
func (s *State) parseTLS(b, before []byte) error {
	if len(b) < tlsHeadLen+tlsSumLen {
		return fmt.Errorf("%w: TLS section of %d bytes", errFormat, len(b))
	}
	sum := sha256.Sum256(before[:len(before)-tlsSumLen])
	if string(sum[:tlsSumLen]) != string(b[len(b)-tlsSumLen:]) {
		return fmt.Errorf("%w: checksum mismatch, it was corrupted in transit", errFormat)
	}
	f, be := b[0], binary.BigEndian
	if f&^byte(tlsFlagAll) != 0 || b[1] != 0 {
		return fmt.Errorf("%w: TLS flags %#x", errVersion, f)
	}
	k := &TLS{Version: be.Uint16(b[2:]), Cipher: be.Uint16(b[4:]), MaxPayload: be.Uint16(b[6:]),
		ZeroCopy: f&tlsFlagZeroCopy != 0, NoPad: f&tlsFlagNoPad != 0}
	b = b[tlsHeadLen : len(b)-tlsSumLen]
	for i, keys := range []*Keys{&k.Tx, &k.Rx} {
		if f&(tlsFlagTx<<i) == 0 {
			continue
		}
		c := findCipher(k.Cipher)
		if c == nil {
			return fmt.Errorf("%w: TLS cipher %d", errVersion, k.Cipher)
		}
		if len(b) < c.size() {
			return fmt.Errorf("%w: truncated TLS keys", errFormat)
		}
		*keys, b = Keys(b[:c.size():c.size()]), b[c.size():]
	}
	if len(b) != 0 {
		return fmt.Errorf("%w: %d bytes after the TLS keys", errFormat, len(b))
	}
	s.TLS = k
	return nil
}
