// SPDX-License-Identifier: Apache-2.0

package guardstate

import (
	"fmt"
	"strings"
)

// Counts is the packets seen by a guard and its known sources.
type Counts struct {
	Passed            uint64          `json:"passed"`             // packets
	Refused           uint64          `json:"refused"`            // packets; under dry_run they passed
	Malformed         uint64          `json:"malformed"`          // of the refused, packets with incomplete headers
	Tiers             map[string]Tier `json:"tiers"`              // by the rank of their sources
	UnderAttack       bool            `json:"under_attack"`       // packets were refused in the last few seconds
	Reserved          float64         `json:"reserved"`           // packets per second reserved by known sources
	ReservationOwners uint32          `json:"reservation_owners"` // sources with a reservation
	Top               []Pattern       `json:"top,omitempty"`
}

// Tier is the packet counts of one tier.
type Tier struct {
	Passed  uint64 `json:"passed"`
	Refused uint64 `json:"refused"`
}

// TierOf describes the sources of a tier.
type TierOf struct{ Name, About string }

// tiers is enum guard_tier, in its order.
var tiers = []TierOf{
	{"reserved", "within their reservation"},
	{"earned", "within their usual rate, without a reservation"},
	{"above", "slightly above their usual rate"},
	{"seen", "seen before"},
	{"fresh", "never seen, or forgotten"},
	{"heavy", "far above their share, or matching such a pattern"},
}

// Tiers returns the tiers, the highest privilege first.
func Tiers() []TierOf { return tiers }

const (
	verdictMalformed = 6
	verdictUnlimited = 7
)

// Pattern is a property shared by many refused packets.
type Pattern struct {
	Level  string  `json:"level"`            // host, net, wide, port or destination
	Prefix string  `json:"prefix,omitempty"` // of the source; for a destination its address and port
	Port   uint16  `json:"port,omitempty"`   // the source port
	PPS    float64 `json:"pps"`              // refused packets per second, average over some 20 seconds, lower bound: the sampling error is subtracted
}

// String returns the pattern in words.
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
