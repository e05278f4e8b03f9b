// SPDX-License-Identifier: Apache-2.0

// Package peers says which BFD sessions the kernel runs (package engine): those of weir's configuration, which are there
// whatever becomes of processes, and those that FRR's bfdd hands over (package dplane), which are a process's.
package peers

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/internal/secret"
)

// Config is the BFD of a network namespace.
type Config struct {
	Netns    string    `json:"netns,omitempty"` // as netns.Open takes it; "": the caller's
	Sessions []Session `json:"sessions,omitempty"`
	// FRR is where a bfdd listens whose sessions the kernel is to run, as its --dplaneaddr has it: unix:PATH, or
	// ipv4:ADDRESS:PORT, or ipv6:[ADDRESS]:PORT; "": none.
	FRR       string      `json:"frr,omitempty"`
	Evaluated []Evaluated `json:"evaluated,omitempty"`
}

// Evaluated is a link that one of bfdd's sessions judges: that with the peer on the device.
type Evaluated struct {
	Name   string     `json:"name"`
	Device string     `json:"device"`
	Peer   netip.Addr `json:"peer"`
}

// judged is the name of what a session of bfdd's judges; "": nothing.
func (c *Config) judged(device string, peer netip.Addr) string {
	for _, j := range c.Evaluated {
		if j.Device == device && j.Peer == peer {
			return j.Name
		}
	}
	return ""
}

// Session is one with a neighbour on a link (RFC 5881).
type Session struct {
	Name       string        `json:"name"`
	Device     string        `json:"device"`
	Peer       netip.Addr    `json:"peer"`
	Local      netip.Addr    `json:"local,omitzero"` // zero: the device's address in the peer's network
	Interval   time.Duration `json:"interval"`       // 1 ms to 60 s, of packets in either direction; the slower end decides
	Multiplier int           `json:"multiplier"`     // of packets that are missing until the link is down; from 1
	// Echo is the least time between echo packets (RFC 5880, 6.4), which are sent where the neighbour says that it loops them back,
	// and between those of the neighbour that it is told to be looped back here; 0: none either way.
	Echo    time.Duration `json:"echo,omitempty"`
	Passive bool          `json:"passive,omitempty"`
	KeyFile string        `json:"key_file,omitempty"` // "": no authentication; else 1 to 20 bytes, a last line end not counted
	KeyID   int           `json:"key_id,omitempty"`   // 0 to 255
	Auth    Auth          `json:"auth,omitempty"`     // "" with a key file: meticulous-sha1
	Observe bool          `json:"observe,omitempty"`  // judges, and does not tell the data path
}

// Auth is how packets are authenticated.
type Auth string

// Kinds of authentication: RFC 5880, 4.4.
const (
	KeyedSHA1      Auth = "keyed-sha1"
	MeticulousSHA1 Auth = "meticulous-sha1"
)

// Limits of intervals.
const (
	minInterval = time.Millisecond
	maxInterval = time.Minute
)

// Validate says what is wrong with a session, by its keys.
func (s *Session) Validate() (errs []error) {
	fail := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	switch {
	case !s.Peer.IsValid():
		fail("peer: say the neighbour's address")
	case s.Peer.IsMulticast() || s.Peer.IsUnspecified() || s.Peer.Is4In6():
		fail("peer: %s is no neighbour's address", s.Peer)
	case s.Peer.Zone() != "" || s.Local.Zone() != "":
		fail("peer: without %%%s: the path says which interface", s.Peer.Zone()+s.Local.Zone())
	case s.Local.IsValid() && s.Local.Is4() != s.Peer.Is4():
		fail("local: %s and the peer %s are of two families", s.Local, s.Peer)
	}
	if s.Interval < minInterval || s.Interval > maxInterval || s.Interval%time.Microsecond != 0 {
		fail("interval: %s: take %s to %s", s.Interval, minInterval, maxInterval)
	}
	if s.Echo != 0 && (s.Echo < minInterval || s.Echo > maxInterval || s.Echo%time.Microsecond != 0) {
		fail("echo: %s: take %s to %s", s.Echo, minInterval, maxInterval)
	}
	if s.Echo != 0 && (s.Peer.IsLinkLocalUnicast() || s.Local.IsLinkLocalUnicast()) && s.Peer.Is6() {
		fail("echo: nothing is forwarded to a link-local address: take global ones of the link for peer and local")
	}
	if s.Multiplier < 1 || s.Multiplier > 255 {
		fail("multiplier: %d: take 1 to 255, 3 in general", s.Multiplier)
	}
	switch {
	case s.KeyFile == "" && (s.Auth != "" || s.KeyID != 0):
		fail("key_file: auth and key_id are about a key: say which file has it")
	case s.Auth != "" && s.Auth != KeyedSHA1 && s.Auth != MeticulousSHA1:
		fail("auth: %q: take %s or %s", s.Auth, KeyedSHA1, MeticulousSHA1)
	case s.KeyID < 0 || s.KeyID > 255:
		fail("key_id: %d: take 0 to 255", s.KeyID)
	}
	return errs
}

// key reads the session's key; nil: it has none.
func (s *Session) key() (*bfd.Key, error) {
	if s.KeyFile == "" {
		return nil, nil
	}
	text, err := secret.Read(s.KeyFile, 22, "1 to 20 bytes")
	if err != nil {
		return nil, fmt.Errorf("key_file: %w", err)
	}
	k := &bfd.Key{Type: bfd.MeticulousSHA1, ID: uint8(s.KeyID), Secret: bytes.TrimRight(text, "\r\n")}
	if s.Auth == KeyedSHA1 {
		k.Type = bfd.KeyedSHA1
	}
	if err := k.Validate(); err != nil {
		return nil, fmt.Errorf("key_file: %s: %w", s.KeyFile, err)
	}
	return k, nil
}

// errAddress says that an address of bfdd's is not one.
var errAddress = errors.New("want unix:PATH, ipv4:ADDRESS:PORT or ipv6:[ADDRESS]:PORT, as bfdd's --dplaneaddr has it")

// Dial splits an address of bfdd's data plane into what net.Dial takes.
func Dial(frr string) (network, address string, err error) {
	family, address, _ := strings.Cut(frr, ":")
	switch family {
	case "unix":
		if !strings.HasPrefix(address, "/") {
			return "", "", fmt.Errorf("%q: %w", frr, errAddress)
		}
		return "unix", address, nil
	case "ipv4", "ipv6":
		if a, err := netip.ParseAddrPort(address); err == nil && a.Addr().Is4() == (family == "ipv4") {
			return "tcp", address, nil
		}
	}
	return "", "", fmt.Errorf("%q: %w", frr, errAddress)
}

// Tick is how often the tick source is to beat: a quarter of the shortest interval, of echoes as well. Of what bfdd will ask for nothing is known.
func (c *Config) Tick() time.Duration {
	const usual = 2500 * time.Microsecond
	tick := usual
	for _, s := range c.Sessions {
		tick = min(tick, s.Interval/4)
		if s.Multiplier == 1 { // who waits for an interval is to get a packet within 90 % of it
			tick = min(tick, s.Interval/8)
		}
		if s.Echo != 0 {
			tick = min(tick, s.Echo/4)
		}
	}
	return max(tick, minInterval/4)
}
