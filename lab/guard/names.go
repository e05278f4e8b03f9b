// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/guard/scenario"
)

// looks is the number of comparisons during an attack, between the names in a guard's status and the
// packets it rejected.
const looks = 4

// witness records each packet rejected by a guard, and compares the names in the guard's status with them.
type witness struct {
	product
	ipv6    bool
	at      []uint64 // times of comparisons, virtual; ascending
	refused []scenario.Packet
	false   []string
}

// newWitness compares at equal intervals of a trace beginning at start, the last time just before its end.
func newWitness(p product, s scenario.Scenario, start uint64) *witness {
	w := &witness{product: p, ipv6: s.IPv6}
	for i := range looks {
		w.at = append(w.at, start+uint64(s.From)+uint64(i+1)*uint64(s.To-s.From)/looks-uint64(time.Millisecond))
	}
	return w
}

// Decide implements scenario.Limiter. It splits batches at the times of comparisons.
func (w *witness) Decide(packets []scenario.Packet, verdicts []bool) error {
	for len(packets) > 0 {
		n := len(packets)
		if len(w.at) > 0 {
			n, _ = slices.BinarySearchFunc(packets, w.at[0], func(p scenario.Packet, at uint64) int {
				if p.At < at {
					return -1
				}
				return 1
			})
			if n == 0 {
				w.check(w.at[0])
				w.at = w.at[1:]
				continue
			}
		}
		if err := w.product.Decide(packets[:n], verdicts[:n]); err != nil {
			return err
		}
		for i := range n {
			if !verdicts[i] {
				w.refused = append(w.refused, packets[i])
			}
		}
		packets, verdicts = packets[n:], verdicts[n:]
	}
	return nil
}

// check finds names with less than half of their rate in status.
func (w *witness) check(at uint64) {
	for _, name := range w.Counts(at).Top {
		if name.Level == "destination" {
			continue // all packets share it
		}
		if rate := w.rate(name, at); rate < name.PPS/2 {
			w.false = append(w.false, fmt.Sprintf("%s at %.1f pps, rejected at %.1f", name, name.PPS, rate))
		}
	}
}

// rate returns the rate of rejected packets of a pattern in packets per second, halved every 2^33 ns like
// in status.
func (w *witness) rate(p guard.Pattern, at uint64) float64 {
	const shift = 33
	const span = (1 << shift) / 1e9 / math.Ln2 // seconds in which a steady rate sends as many packets as its weight
	prefix, _ := netip.ParsePrefix(p.Prefix)   // invalid for a port
	sum := 0.0
	for i := range w.refused {
		r := &w.refused[i]
		age := at>>shift - r.At>>shift
		if age > 10 {
			continue
		}
		if p.Level == "port" && r.SrcPort == p.Port || p.Level != "port" && prefix.Contains(r.Src.Addr(w.ipv6)) {
			sum += 1 / float64(uint64(1)<<age)
		}
	}
	return sum / span
}
