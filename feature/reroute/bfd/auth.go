// SPDX-License-Identifier: Apache-2.0

package bfd

import (
	"crypto/sha1"
	"fmt"
)

// AuthType is the authentication type of packets, RFC 5880 section 4.1.
type AuthType uint8

// Keyed SHA1, RFC 5880 section 4.4. The meticulous variant increments the sequence number with every packet.
const (
	KeyedSHA1      AuthType = 4
	MeticulousSHA1 AuthType = 5
)

func (t AuthType) String() string {
	switch t {
	case KeyedSHA1:
		return "keyed sha1"
	case MeticulousSHA1:
		return "meticulous keyed sha1"
	}
	return fmt.Sprintf("authentication type %d", uint8(t))
}

// Key authenticates the packets of a session in both directions.
type Key struct {
	Type   AuthType
	ID     uint8
	Secret []byte // 1 to 20 bytes
}

// Validate returns the error of a key.
func (k *Key) Validate() error {
	if k.Type != KeyedSHA1 && k.Type != MeticulousSHA1 {
		return fmt.Errorf("%s: want keyed sha1 or meticulous keyed sha1", k.Type)
	}
	if len(k.Secret) == 0 || len(k.Secret) > sha1.Size {
		return fmt.Errorf("a secret of %d bytes: want 1 to %d", len(k.Secret), sha1.Size)
	}
	return nil
}
