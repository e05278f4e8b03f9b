// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// These limits bound a registration. A load balancer forwards it to all other backends.
const (
	maxAgent    = 260 // bytes of host:port: a DNS name has up to 253
	maxServices = 64  // of a load balancer
	maxName     = 255
)

// Check validates a registration by itself and removes duplicate names of services.
func (r *Registration) Check() error {
	if r.Address.Zone() != "" {
		return fmt.Errorf("address %.60q has a zone: give an address without one, reachable by the load balancer", r.Address)
	}
	if err := checkAgent(r.Agent); err != nil {
		return err
	}
	for _, names := range []*[]string{&r.Services, &r.Unserved} {
		sorted := slices.Compact(slices.Sorted(slices.Values(*names)))
		if len(sorted) > maxServices {
			return fmt.Errorf("%d services: a load balancer has at most %d", len(sorted), maxServices)
		}
		for _, n := range sorted {
			if len(n) > maxName {
				return fmt.Errorf("service %.60q… has a name of %d bytes: at most %d", n, len(n), maxName)
			}
		}
		if len(sorted) < len(*names) {
			*names = sorted
		}
	}
	return nil
}

// checkAgent checks the address of an agent for other backends. "" means none.
func checkAgent(at string) error {
	if at == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(at)
	n, perr := strconv.ParseUint(port, 10, 16)
	odd := strings.ContainsFunc(at, func(c rune) bool { return c <= ' ' || c > '~' || strings.ContainsRune(`"\<>&`, c) })
	if len(at) > maxAgent || err != nil || perr != nil || n == 0 || host == "" || odd {
		return fmt.Errorf("agent %.60q: want an address for agents of other backends, like 192.0.2.11:7947, in at most %d bytes", at, maxAgent)
	}
	return nil
}

// Fit returns p shortened to a frame, and the names of the omitted members. A receiver would close
// the connection at a longer frame.
func (p Peers) Fit() (Peers, []string) {
	size := func(v any) int {
		b, _ := json.Marshal(v) // Tell reports the error
		return len(b)
	}
	if size(p) <= maxControl {
		return p, nil
	}
	all := p.Members
	p.Members = nil
	room := maxControl - size(p) - len(`"members":[],`)
	byLength := make([]int, len(all))
	sizes := make([]int, len(all))
	for i, m := range all {
		byLength[i], sizes[i] = i, size(m)+1
	}
	slices.SortStableFunc(byLength, func(a, b int) int { return sizes[a] - sizes[b] })
	stays := make([]bool, len(all))
	for _, i := range byLength { // omit the longest ones, so most of them fit
		room -= sizes[i]
		stays[i] = room >= 0
	}
	var left []string
	for i, m := range all {
		if stays[i] {
			p.Members = append(p.Members, m)
		} else {
			left = append(left, m.Name)
		}
	}
	return p, left
}
