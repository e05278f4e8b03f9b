// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/safefile"
)

// Limits of a devices file.
const (
	maxDevicesFile = 16 << 20 // bytes
	maxAliases     = 65536    // prefixes: STEER_MAX_DEVICES
	maxDeviceName  = 64       // bytes
)

// errDevices is wrapped by every error about the content of a devices file.
var errDevices = errors.New("invalid devices file")

// DeviceList maps addresses to devices.
type DeviceList struct {
	Devices []NamedDevice
	by      map[netip.Prefix]int // v4-mapped prefix to index in Devices
	lengths []int                // of the prefixes, v4-mapped, longest first
	Text    []byte               // as pinned
}

// NamedDevice is a device with a name. The address of its first prefix represents it in hashes, moves and tables.
type NamedDevice struct {
	Name     string
	Prefixes []netip.Prefix
	line     int
}

// Stands returns the device's representative address.
func (d NamedDevice) Stands() netip.Addr { return d.Prefixes[0].Addr() }

// LoadDevices reads a devices file:
//
//	# name    addresses and prefixes
//	edge1.fra 192.0.2.1 198.51.100.0/30 2001:db8::1
//
// Each line is one device; # begins a comment. Errors contain file and line.
func LoadDevices(path string) (*DeviceList, error) {
	f, err := safefile.Read(path, maxDevicesFile)
	if errors.Is(err, safefile.ErrRefused) {
		return nil, fmt.Errorf("%w: %w", errDevices, err)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: write it, with a line for each device: its name, then its addresses and prefixes, like \"edge1 192.0.2.1 2001:db8::/64\"", err)
	}
	if err != nil {
		return nil, err
	}
	l, err := ParseDevices(path, f.Data)
	if err != nil && !f.Public() {
		return nil, fmt.Errorf("%w: %s has errors, hidden because the file is not world-readable: chmod o+r %s", errDevices, path, path)
	}
	return l, err
}

// ParseDevices parses the content of a devices file.
func ParseDevices(file string, text []byte) (*DeviceList, error) {
	l := &DeviceList{by: map[netip.Prefix]int{}, Text: bytes.TrimRight(text, "\x00")} // NUL bytes pad the pinned text
	names, stand := map[string]int{}, map[netip.Addr]int{}
	var errs []error
	for i, line := range strings.Split(string(l.Text), "\n") {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		d := NamedDevice{Name: fields[0], line: i + 1}
		err := l.add(d, fields[1:], names, stand)
		if err != nil {
			errs = append(errs, fmt.Errorf("%w: %s:%d: %w", errDevices, file, i+1, err))
		}
		if len(errs) == 20 {
			errs = append(errs, fmt.Errorf("%w: %s: fix these first", errDevices, file))
			break
		}
	}
	if len(l.by) > maxAliases {
		errs = append(errs, fmt.Errorf("%w: %s: %d prefixes, the maximum is %d", errDevices, file, len(l.by), maxAliases))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	for p := range l.by {
		if !slices.Contains(l.lengths, p.Bits()) {
			l.lengths = append(l.lengths, p.Bits())
		}
	}
	slices.Sort(l.lengths)
	slices.Reverse(l.lengths)
	return l, nil
}

func (l *DeviceList) add(d NamedDevice, prefixes []string, names map[string]int, stand map[netip.Addr]int) error {
	if _, err := parsePrefix(d.Name); err == nil {
		return fmt.Errorf("%s is an address: the device's name comes first, like \"edge1 %s\"", d.Name, d.Name)
	}
	if len(d.Name) > maxDeviceName {
		return fmt.Errorf("the name %.20s… has %d bytes, the maximum is %d", d.Name, len(d.Name), maxDeviceName)
	}
	if first, ok := names[d.Name]; ok {
		return fmt.Errorf("%s is repeated, first in line %d: put all its addresses in one line", d.Name, first)
	}
	names[d.Name] = d.line
	if len(prefixes) == 0 {
		return fmt.Errorf("%s has no address: add addresses after its name", d.Name)
	}
	for _, text := range prefixes {
		p, err := parsePrefix(text)
		if err != nil {
			return err
		}
		key := mapped(p)
		if other, ok := l.by[key]; ok {
			if other == len(l.Devices) {
				return fmt.Errorf("%s twice", text)
			}
			return fmt.Errorf("%s already belongs to %s, in line %d", text, l.Devices[other].Name, l.Devices[other].line)
		}
		d.Prefixes = append(d.Prefixes, p)
		l.by[key] = len(l.Devices)
	}
	if line, ok := stand[d.Stands()]; ok {
		return fmt.Errorf("the first address of %s, %s, already represents the device of line %d: begin with another address", d.Name, d.Stands(), line)
	}
	stand[d.Stands()] = d.line
	l.Devices = append(l.Devices, d)
	return nil
}

// parsePrefix parses an address or a prefix.
func parsePrefix(text string) (netip.Prefix, error) {
	bad := func(format string, a ...any) (netip.Prefix, error) {
		return netip.Prefix{}, fmt.Errorf("%q: %s", text, fmt.Sprintf(format, a...))
	}
	var p netip.Prefix
	if a, err := netip.ParseAddr(text); err == nil {
		if a.Zone() != "" {
			return bad("zones are not supported: leave out %%%s", a.Zone())
		}
		a = a.Unmap()
		p = netip.PrefixFrom(a, a.BitLen())
	} else if p, err = netip.ParsePrefix(text); err != nil {
		return bad("not an IP address or prefix: want one like 192.0.2.7 or 2001:db8::/64")
	}
	switch {
	case p.Masked() != p:
		return bad("it has bits set beyond its length; did you mean %s?", p.Masked())
	case p.Addr().Is4In6():
		return bad("write IPv4 as IPv4")
	case p.Addr().Is6() && p.Contains(netip.MustParseAddr("::ffff:0:0")):
		return bad("it contains IPv4, hashed as ::ffff:a.b.c.d: use a longer prefix")
	}
	return p, nil
}

// mapped returns a prefix as used by the program: IPv4 is v4-mapped.
func mapped(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4() {
		return netip.PrefixFrom(netip.AddrFrom16(p.Addr().As16()), p.Bits()+96)
	}
	return p
}

// Find returns the device of an address, or nil.
func (l *DeviceList) Find(a netip.Addr) *NamedDevice {
	if l == nil {
		return nil
	}
	wide := netip.AddrFrom16(a.As16())
	for _, n := range l.lengths {
		if i, ok := l.by[netip.PrefixFrom(wide, n).Masked()]; ok {
			return &l.Devices[i]
		}
	}
	return nil
}

// Named returns the device called name, or nil.
func (l *DeviceList) Named(name string) *NamedDevice {
	if l == nil {
		return nil
	}
	for i := range l.Devices {
		if l.Devices[i].Name == name {
			return &l.Devices[i]
		}
	}
	return nil
}

// Stands returns the representative address of an address's device. Without a device it returns the address.
func (l *DeviceList) Stands(a netip.Addr) netip.Addr {
	if d := l.Find(a); d != nil {
		return d.Stands()
	}
	return a.Unmap()
}

// DeviceFile is the pinned description of a devices file.
type DeviceFile struct {
	Count int    `json:"count"`
	Hash  string `json:"hash"` // SHA-256 of the text
}

// File describes the devices file. It returns nil without devices.
func (l *DeviceList) File() *DeviceFile {
	if l == nil {
		return nil
	}
	sum := sha256.Sum256(l.Text)
	return &DeviceFile{Count: len(l.Devices), Hash: hex.EncodeToString(sum[:])}
}

// steerAliasKey and steerAlias are struct alias_key and struct alias.
type steerAliasKey struct {
	Prefixlen uint32
	Addr      [16]uint8
}

type steerAlias struct{ Addr [16]uint8 }

// namesChunk is the value size in bytes of map_names, the copy of the file's text.
const namesChunk = 4096

// Maps creates the pinned maps of a service's devices. aliases is for the program. names contains the text, for readers
// and later changes of the service.
func (l *DeviceList) Maps(engine *ebpf.CollectionSpec) (aliases, names *ebpf.Map, err error) {
	inner := engine.Maps[bpf.SteerMapSteerAliases].InnerMap.Copy()
	inner.Name = "steer_alias"
	if aliases, err = ebpf.NewMap(inner); err != nil {
		return nil, nil, fmt.Errorf("create map of devices: %w", err)
	}
	names, err = ebpf.NewMap(&ebpf.MapSpec{Name: "steer_names", Type: ebpf.Array, KeySize: 4, ValueSize: namesChunk,
		MaxEntries: uint32(len(l.Text)/namesChunk + 1)})
	if err != nil {
		aliases.Close()
		return nil, nil, fmt.Errorf("create map of device names: %w", err)
	}
	if err = l.fill(aliases, names); err != nil {
		aliases.Close()
		names.Close()
		return nil, nil, fmt.Errorf("write devices: %w", err)
	}
	return aliases, names, nil
}

func (l *DeviceList) fill(aliases, names *ebpf.Map) error {
	for p, i := range l.by {
		k := steerAliasKey{Prefixlen: uint32(p.Bits()), Addr: p.Addr().As16()}
		if err := aliases.Put(k, steerAlias{Addr: l.Devices[i].Stands().As16()}); err != nil {
			return err
		}
	}
	for i := 0; i*namesChunk < len(l.Text); i++ {
		chunk := make([]byte, namesChunk)
		copy(chunk, l.Text[i*namesChunk:])
		if err := names.Put(uint32(i), chunk); err != nil {
			return err
		}
	}
	return nil
}

// FileText formats a devices file for plans.
func FileText(path string, f *DeviceFile) string {
	if f == nil {
		return "none"
	}
	return fmt.Sprintf("%s (%d, %.8s)", path, f.Count, f.Hash)
}
