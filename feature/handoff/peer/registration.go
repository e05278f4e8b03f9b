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

// Limits of a registration. A load balancer passes it on to all other backends.
const (
	maxAgent    = 260 // bytes of host:port: a name of DNS has 253
	maxServices = 64  // that a load balancer has
	maxName     = 255
)

// Check says what is wrong with a registration by itself, and removes repeated names of services.
func (r *Registration) Check() error {
	if r.Address.Zone() != "" {
		return fmt.Errorf("address %.60q has a zone: say the backend's address alone, one that the load balancer can reach", r.Address)
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

// checkAgent checks where other backends' agents are to connect to; "" is nowhere.
func checkAgent(at string) error {
	if at == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(at)
	n, perr := strconv.ParseUint(port, 10, 16)
	odd := strings.ContainsFunc(at, func(c rune) bool { return c <= ' ' || c > '~' || strings.ContainsRune(`"\<>&`, c) })
	if len(at) > maxAgent || err != nil || perr != nil || n == 0 || host == "" || odd {
		return fmt.Errorf("agent %.60q: say where the agents of other backends find it, like 192.0.2.11:7947, in at most %d bytes", at, maxAgent)
	}
	return nil
}

// Fit is p without the members that a frame has no room for, and their names. Receivers end a connection by which more comes.
func (p Peers) Fit() (Peers, []string) {
	size := func(v any) int {
		b, _ := json.Marshal(v) // what cannot be told is an error of Tell
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
	for _, i := range byLength { // most of them stay if the longest go
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
