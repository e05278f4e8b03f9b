// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel/internal/parts"
)

// LayoutVersion is the version of the directory layout and of meta.
const LayoutVersion = 1

// metaMagic begins every meta: "weir".
const metaMagic = 0x72696577

// ErrABI is returned for pins of an unknown ABI or layout.
var ErrABI = errors.New("pins of another version")

// Meta describes the origin of an instance.
type Meta struct {
	ABI     uint32            // version of the feature's map layouts
	Object  [sha256.Size]byte // SHA-256 of the loaded BPF object
	Cookie  uint64            // SO_NETNS_COOKIE of its namespace; 0 if the kernel has none
	Inode   uint64            // inode number of its namespace
	Created time.Time
	Version string // version of the weir that published it, at most 63 bytes
	Config  []byte // configuration of the instance; its SHA-256 is the config's hash

	parts parts.Parts
}

// metaHeader is the fixed part, in host byte order.
type metaHeader struct {
	Magic, Layout, ABI, ConfigLen uint32
	Object, Config                [sha256.Size]byte
	Cookie, Inode                 uint64
	Created                       int64 // ns since the epoch
	Version                       [64]byte
}

// ConfigHash returns the SHA-256 of the instance's configuration.
func (m Meta) ConfigHash() [sha256.Size]byte { return sha256.Sum256(m.Config) }

// RequireABI returns an error wrapping [ErrABI] unless the ABI of i with meta m is known.
func (m Meta) RequireABI(i Instance, known uint32) error {
	if m.ABI == known {
		return nil
	}
	return fmt.Errorf("%w: %s has ABI %d, made by weir %s, and this weir supports ABI %d: use that version, or remove it with that version first; it stays as it is",
		ErrABI, i, m.ABI, m.Version, known)
}

func (m Meta) marshal() []byte {
	h := metaHeader{Magic: metaMagic, Layout: LayoutVersion, ABI: m.ABI, ConfigLen: uint32(len(m.Config)),
		Object: m.Object, Config: m.ConfigHash(), Cookie: m.Cookie, Inode: m.Inode, Created: m.Created.UnixNano()}
	copy(h.Version[:63], m.Version)
	var b bytes.Buffer
	binary.Write(&b, binary.NativeEndian, h) // a bytes.Buffer does not fail
	b.Write(m.Config)
	b.Write(m.parts.Marshal())
	return b.Bytes()
}

func (m *Meta) unmarshal(b []byte) error {
	var h metaHeader
	r := bytes.NewReader(b)
	if err := binary.Read(r, binary.NativeEndian, &h); err != nil {
		return fmt.Errorf("%w: meta of %d bytes is too short", ErrABI, len(b))
	}
	if h.Magic != metaMagic {
		return fmt.Errorf("%w: meta has no magic number of weir", ErrABI)
	}
	if h.Layout != LayoutVersion {
		return fmt.Errorf("%w: layout %d, and this weir supports layout %d: use the version that made them, or remove them with it first", ErrABI, h.Layout, LayoutVersion)
	}
	if uint64(h.ConfigLen) > uint64(r.Len()) {
		return fmt.Errorf("%w: meta announces %d bytes of config and has %d", ErrABI, h.ConfigLen, r.Len())
	}
	*m = Meta{ABI: h.ABI, Object: h.Object, Cookie: h.Cookie, Inode: h.Inode, Created: time.Unix(0, h.Created)}
	m.Version = string(bytes.TrimRight(h.Version[:], "\x00"))
	rest := b[len(b)-r.Len():]
	m.Config = bytes.Clone(rest[:h.ConfigLen])
	if m.ConfigHash() != h.Config {
		return fmt.Errorf("%w: the config in meta does not match its hash", ErrABI)
	}
	var err error
	if m.parts, err = parts.Parse(rest[h.ConfigLen:]); err != nil {
		return fmt.Errorf("%w: %w", ErrABI, err)
	}
	return nil
}

// read reads the meta of an instance from its map.
func (m *Meta) read(pin *ebpf.Map, i Instance) error {
	b, err := pin.LookupBytes(uint32(0))
	if err == nil {
		err = m.unmarshal(b)
	}
	if err != nil {
		return err
	}
	if err := m.parts.Fits(i.String()); err != nil {
		return fmt.Errorf("%w: %w: %s", ErrDamaged, err, remedyApply)
	}
	return nil
}

// create creates the map of m, with one element of the needed size.
func (m Meta) create() (*ebpf.Map, error) {
	b := m.marshal()
	mp, err := ebpf.NewMap(&ebpf.MapSpec{Name: metaPin, Type: ebpf.Array, KeySize: 4, ValueSize: uint32(len(b)), MaxEntries: 1})
	if err != nil {
		return nil, explainLoad("create meta", err)
	}
	if err := mp.Put(uint32(0), b); err != nil {
		mp.Close()
		return nil, fmt.Errorf("write meta: %w", err)
	}
	return mp, nil
}

// Version is the version of this weir, as stored in each meta. main sets it once, before any publication.
var Version = "devel"
