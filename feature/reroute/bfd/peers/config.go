// SPDX-License-Identifier: Apache-2.0

// Package peers configures the kernel's BFD sessions (package engine). The sessions of weir's configuration exist
// without processes. Sessions handed over by FRR's bfdd (package dplane) belong to a process.
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
	Netns    string    `json:"netns,omitempty"` // as for netns.Open; "": the caller's
	Sessions []Session `json:"sessions,omitempty"`
	// FRR is the address of a bfdd with sessions for the kernel, as in its --dplaneaddr: unix:PATH,
	// ipv4:ADDRESS:PORT, or ipv6:[ADDRESS]:PORT; "": none.
	FRR       string      `json:"frr,omitempty"`
	Evaluated []Evaluated `json:"evaluated,omitempty"`
}

// Evaluated is a link judged by one of bfdd's sessions, the one with Peer on Device.
type Evaluated struct {
	Name   string     `json:"name"`
	Device string     `json:"device"`
	Peer   netip.Addr `json:"peer"`
}

// judged returns the name of the link judged by a session of bfdd; "": none.
func (c *Config) judged(device string, peer netip.Addr) string {
	for _, j := range c.Evaluated {
		if j.Device == device && j.Peer == peer {
			return j.Name
		}
	}
	return ""
}

// Session is a session with a neighbour on a link (RFC 5881).
type Session struct {
	Name       string        `json:"name"`
	Device     string        `json:"device"`
	Peer       netip.Addr    `json:"peer"`
	Local      netip.Addr    `json:"local,omitzero"` // zero: the device's address in the peer's network
	Interval   time.Duration `json:"interval"`       // 1 ms to 60 s, in both directions; the slower end decides
	Multiplier int           `json:"multiplier"`     // number of missing packets for a failure; from 1
	// Echo is the shortest time between echo packets in either direction (RFC 5880 section 6.4); 0: none. They are
	// sent if the neighbour announces to loop them back.
	Echo    time.Duration `json:"echo,omitempty"`
	Passive bool          `json:"passive,omitempty"`
	KeyFile string        `json:"key_file,omitempty"` // "": no authentication; else a file with 1 to 20 bytes and an optional line end
	KeyID   int           `json:"key_id,omitempty"`   // 0 to 255
	Auth    Auth          `json:"auth,omitempty"`     // "" with a key file: meticulous-sha1
	Observe bool          `json:"observe,omitempty"`  // judge without informing the data path
}

// Auth is the authentication type of packets.
type Auth string

// Authentication types: RFC 5880 section 4.4.
const (
	KeyedSHA1      Auth = "keyed-sha1"
	MeticulousSHA1 Auth = "meticulous-sha1"
)

// Limits of intervals.
const (
	minInterval = time.Millisecond
	maxInterval = time.Minute
)

// Validate returns all errors of a session, by key.
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
		fail("local: %s and the peer %s are of different families", s.Local, s.Peer)
	}
	if s.Interval < minInterval || s.Interval > maxInterval || s.Interval%time.Microsecond != 0 {
		fail("interval: %s: use %s to %s", s.Interval, minInterval, maxInterval)
	}
	if s.Echo != 0 && (s.Echo < minInterval || s.Echo > maxInterval || s.Echo%time.Microsecond != 0) {
		fail("echo: %s: use %s to %s", s.Echo, minInterval, maxInterval)
	}
	if s.Echo != 0 && (s.Peer.IsLinkLocalUnicast() || s.Local.IsLinkLocalUnicast()) && s.Peer.Is6() {
		fail("echo: nothing is forwarded to a link-local address: use global addresses of the link for peer and local")
	}
	if s.Multiplier < 1 || s.Multiplier > 255 {
		fail("multiplier: %d: use 1 to 255, 3 in general", s.Multiplier)
	}
	switch {
	case s.KeyFile == "" && (s.Auth != "" || s.KeyID != 0):
		fail("key_file: auth and key_id need a file with the key")
	case s.Auth != "" && s.Auth != KeyedSHA1 && s.Auth != MeticulousSHA1:
		fail("auth: %q: use %s or %s", s.Auth, KeyedSHA1, MeticulousSHA1)
	case s.KeyID < 0 || s.KeyID > 255:
		fail("key_id: %d: use 0 to 255", s.KeyID)
	}
	return errs
}

// key reads the session's key, or returns nil without one.
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

// errAddress reports an invalid address of bfdd.
var errAddress = errors.New("want unix:PATH, ipv4:ADDRESS:PORT or ipv6:[ADDRESS]:PORT, as bfdd's --dplaneaddr has it")

// Dial splits an address of bfdd's data plane into the arguments of net.Dial.
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

// Tick returns the tick for the sessions: a quarter of the shortest interval, including echo intervals. The intervals
// of bfdd's sessions are not known.
func (c *Config) Tick() time.Duration {
	const usual = 2500 * time.Microsecond
	tick := usual
	for _, s := range c.Sessions {
		tick = min(tick, s.Interval/4)
		if s.Multiplier == 1 { // the neighbour must get a packet within 90 % of the interval
			tick = min(tick, s.Interval/8)
		}
		if s.Echo != 0 {
			tick = min(tick, s.Echo/4)
		}
	}
	return max(tick, minInterval/4)
}
