// SPDX-License-Identifier: Apache-2.0

package front

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"net"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/handoff/move"
)

// MostHosts is the highest number that a host may have.
const MostHosts = move.Host(1<<10 - 1)

// Buckets is how many parts a service's new flows are spread in; each goes to one host.
const Buckets = 4096

// Host is a server behind the front end, on a segment with it.
type Host struct {
	Number    move.Host // 1 to MostHosts
	Name      string    // by which new flows are spread: it stays when numbers change
	Interface int       // of the front end, that leads to it
	MAC       net.HardwareAddr
	Weight    int // of its share of new flows; 0 for none
}

// Service is what clients ask for. Its address is on every host.
type Service struct {
	ID       int // below 64
	Listen   netip.AddrPort
	Proto    uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	BySource bool  // all flows of a client's address are of one host
}

func (h Host) check() error {
	switch {
	case h.Number == 0 || h.Number > MostHosts:
		return fmt.Errorf("host %s: number %d: take one of 1 to %d", h.Name, h.Number, MostHosts)
	case h.Name == "":
		return fmt.Errorf("host %d has no name", h.Number)
	case len(h.MAC) != 6:
		return fmt.Errorf("host %s: MAC address %q: give one of six bytes", h.Name, h.MAC)
	case h.Interface <= 0:
		return fmt.Errorf("host %s: no interface leads to it", h.Name)
	case h.Weight < 0:
		return fmt.Errorf("host %s: weight %d: it must not be below 0", h.Name, h.Weight)
	}
	return nil
}

// ring assigns the buckets to hosts by weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash
// tables", 2005): a host that comes or goes changes no more than its own share, and all front ends find the same.
func ring(hosts []Host) []uint16 {
	out := make([]uint16, Buckets)
	sorted := slices.SortedFunc(slices.Values(hosts), func(a, b Host) int { return cmp.Compare(a.Name, b.Name) })
	for bucket := range out {
		best := math.Inf(-1)
		for _, h := range sorted {
			if h.Weight == 0 {
				continue
			}
			if score := score(h, bucket); score > best {
				best, out[bucket] = score, uint16(h.Number)
			}
		}
	}
	return out
}

// score is -weight / ln(u), with u a number between 0 and 1 that only depends on the host's name and the bucket.
func score(h Host, bucket int) float64 {
	f := fnv.New64a()
	fmt.Fprintf(f, "%d/%s", bucket, h.Name)
	x := f.Sum64() // fnv's upper bits are alike for alike words: mixed once more, as splitmix64 does
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	u := (float64(x>>11) + 0.5) / (1 << 53)
	return -float64(h.Weight) / math.Log(u)
}

// SetHosts has these be the hosts, for every service. Flows keep theirs; new ones go by the weights.
func (f *Front) SetHosts(hosts []Host) error {
	var errs []error
	seen := map[move.Host]bool{}
	for _, h := range hosts {
		errs = append(errs, h.check())
		if seen[h.Number] {
			errs = append(errs, fmt.Errorf("host %s: another one has number %d", h.Name, h.Number))
		}
		seen[h.Number] = true
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, h := range hosts {
		if err := f.putHost(h); err != nil {
			return err
		}
	}
	buckets := ring(hosts)
	for service := range maxServices {
		for i, host := range buckets {
			if err := f.maps.FrontRing.Put(uint32(service*Buckets+i), host); err != nil {
				return fmt.Errorf("spreading new flows: %w", err)
			}
		}
	}
	return f.dropHosts(seen)
}

func (f *Front) putHost(h Host) error {
	from, err := interfaceMAC(h.Interface)
	if err != nil {
		return fmt.Errorf("host %s: %w", h.Name, err)
	}
	v := frontFrontHost{Ifindex: uint32(h.Interface), Mac: [6]uint8(h.MAC), From: from}
	if err := f.maps.FrontHosts.Put(uint32(h.Number), v); err != nil {
		return fmt.Errorf("host %s: %w", h.Name, err)
	}
	k := frontFrontMacKey{Ifindex: uint32(h.Interface), Mac: [6]uint8(h.MAC)}
	if err := f.maps.FrontMacs.Put(k, uint32(h.Number)); err != nil {
		return fmt.Errorf("host %s: %w", h.Name, err)
	}
	return nil
}

// dropHosts takes away those that are not to stay.
func (f *Front) dropHosts(stay map[move.Host]bool) error {
	var gone []frontFrontMacKey
	var k frontFrontMacKey
	var number uint32
	it := f.maps.FrontMacs.Iterate()
	for it.Next(&k, &number) {
		if !stay[move.Host(number)] {
			gone = append(gone, k)
		}
	}
	err := it.Err()
	for _, k := range gone {
		if e := f.maps.FrontMacs.Lookup(k, &number); e == nil {
			err = errors.Join(err, f.maps.FrontHosts.Put(number, frontFrontHost{}))
		}
		err = errors.Join(err, f.maps.FrontMacs.Delete(k))
	}
	return err
}

func interfaceMAC(index int) ([6]uint8, error) {
	i, err := net.InterfaceByIndex(index)
	if err != nil {
		return [6]uint8{}, fmt.Errorf("interface %d: %w", index, err)
	}
	if len(i.HardwareAddr) != 6 {
		return [6]uint8{}, fmt.Errorf("interface %s has no Ethernet address", i.Name)
	}
	return [6]uint8(i.HardwareAddr), nil
}
