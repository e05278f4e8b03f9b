// SPDX-License-Identifier: Apache-2.0

package bfdtest

import (
	"crypto/sha1"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/reroute/bfd"
)

// Auth is the authentication section of keyed SHA1, RFC 5880 section 4.4.
type Auth struct {
	Type     bfd.AuthType
	KeyID    uint8
	Sequence uint32
	Digest   [sha1.Size]byte
}

const (
	authLength = 28
	digestAt   = headLength + 8
)

func (a *Auth) append(b []byte) []byte {
	b = append(b, byte(a.Type), authLength, a.KeyID, 0)
	b = binary.BigEndian.AppendUint32(b, a.Sequence)
	return append(b, a.Digest[:]...)
}

func parseAuth(b []byte) (*Auth, error) {
	t := bfd.AuthType(b[0])
	if t != bfd.KeyedSHA1 && t != bfd.MeticulousSHA1 {
		return nil, fmt.Errorf("%w: %s: weir has keyed sha1 and meticulous keyed sha1", errPacket, t)
	}
	if len(b) != authLength || b[1] != authLength {
		return nil, fmt.Errorf("%w: %d bytes of %s, and %d by its own length; want %d", errPacket, len(b), t, b[1], authLength)
	}
	return &Auth{Type: t, KeyID: b[2], Sequence: binary.BigEndian.Uint32(b[4:]), Digest: [sha1.Size]byte(b[8:])}, nil
}

// errAuth reports a packet without a valid digest, or an old one.
var errAuth = errors.New("not authentic")

// Seal writes the digest into a packet written by Append at the beginning of b.
func Seal(k *bfd.Key, b []byte) {
	d := digest(k, b)
	copy(b[digestAt:], d[:])
}

// digest is the SHA1 of the packet with the secret in the digest's place.
func digest(k *bfd.Key, b []byte) [sha1.Size]byte {
	var whole [headLength + authLength]byte
	copy(whole[:digestAt], b)
	copy(whole[digestAt:], k.Secret)
	return sha1.Sum(whole[:])
}

// Check verifies the digest and the sequence number of a packet read from b by Parse. last is the sequence number of
// the latest authentic packet, if known. window is three times the detection multiplier (RFC 5880 section 6.7.4).
func Check(k *bfd.Key, b []byte, p *Packet, last uint32, known bool, window uint32) error {
	a := p.Auth
	switch {
	case a == nil:
		return fmt.Errorf("%w: without authentication, and the session has %s", errAuth, k.Type)
	case a.Type != k.Type:
		return fmt.Errorf("%w: %s, and the session has %s", errAuth, a.Type, k.Type)
	case a.KeyID != k.ID:
		return fmt.Errorf("%w: key %d, and the session has key %d", errAuth, a.KeyID, k.ID)
	}
	if known {
		least := uint32(0)
		if k.Type == bfd.MeticulousSHA1 {
			least = 1
		}
		if ahead := a.Sequence - last; ahead < least || ahead > window {
			return fmt.Errorf("%w: sequence number %d after %d", errAuth, a.Sequence, last)
		}
	}
	want := digest(k, b)
	if subtle.ConstantTimeCompare(want[:], a.Digest[:]) == 0 {
		return fmt.Errorf("%w: the digest is another's", errAuth)
	}
	return nil
}
