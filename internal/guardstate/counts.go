// SPDX-License-Identifier: Apache-2.0

package guardstate

import (
	"fmt"
	"strings"
)

// Counts is what a guard has seen and whom it knows.
type Counts struct {
	Passed            uint64          `json:"passed"`             // packets
	Refused           uint64          `json:"refused"`            // packets; under dry_run they passed
	Malformed         uint64          `json:"malformed"`          // of the refused, packets whose headers cannot be read to their end
	Tiers             map[string]Tier `json:"tiers"`              // by what their sources have earned
	UnderAttack       bool            `json:"under_attack"`       // something was refused in the last few seconds
	Reserved          float64         `json:"reserved"`           // packets per second that known sources have reserved
	ReservationOwners uint32          `json:"reservation_owners"` // sources with a reservation
	Top               []Pattern       `json:"top,omitempty"`
}

// Tier is what became of the packets of one tier.
type Tier struct {
	Passed  uint64 `json:"passed"`
	Refused uint64 `json:"refused"`
}

// TierOf says what sources a tier's packets are of.
type TierOf struct{ Name, About string }

// tiers are enum guard_tier, in its order.
var tiers = []TierOf{
	{"reserved", "stay within what they have reserved"},
	{"earned", "stay within what they have long shown, but could not reserve"},
	{"above", "exceed it, but not by much"},
	{"seen", "were seen before"},
	{"fresh", "were never seen, or forgotten"},
	{"heavy", "take far more than their share, or belong to a pattern that does"},
}

// Tiers are the tiers of packets, the one that may most first.
func Tiers() []TierOf { return tiers }

const (
	verdictMalformed = 6
	verdictUnlimited = 7
)

// Pattern is what many refused packets have in common.
type Pattern struct {
	Level  string  `json:"level"`            // host, net, wide, port or destination
	Prefix string  `json:"prefix,omitempty"` // of the source; the destination's address and port
	Port   uint16  `json:"port,omitempty"`   // the source port
	PPS    float64 `json:"pps"`              // refused packets per second over the last 20 seconds or so, at least: the error of sampling is taken off
}

// String is the pattern as people read it.
func (p Pattern) String() string {
	switch p.Level {
	case "port":
		return fmt.Sprintf("source port %d", p.Port)
	case "destination":
		return "to " + p.Prefix
	}
	return "from " + strings.TrimSuffix(p.Prefix, "/32") // one host
}

// Read adds the counters up, as of a time.
func (s *Layout) Read(now uint64) Counts {
	c := Counts{Tiers: map[string]Tier{}, ReservationOwners: s.Total.Holders,
		Reserved:    float64(s.Total.Reserved) * 1e9 / (1 << epochShift),
		UnderAttack: uint32(now>>epochShift)-s.Total.Hot <= 2}
	var sum [8][2]uint64
	for _, cpu := range s.Counters {
		for v := range sum {
			sum[v][0] += cpu.Verdict[v][0]
			sum[v][1] += cpu.Verdict[v][1]
		}
	}
	for v, n := range sum {
		c.Passed += n[0]
		c.Refused += n[1]
		if v < len(tiers) {
			c.Tiers[tiers[v].Name] = Tier{n[0], n[1]}
		}
	}
	c.Malformed = sum[verdictMalformed][1]
	c.Top = s.top(now)
	return c
}
