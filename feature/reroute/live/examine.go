// SPDX-License-Identifier: Apache-2.0

package live

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/weir-project/weir/feature"
)

// examine says what of the namespace would keep sessions from working, and warns of what is missing as yet.
func examine(plan *feature.Plan, c Config) error {
	if _, err := loopCPUs(c.CPUs); err != nil {
		return err
	}
	for _, s := range c.Sessions {
		_, err := findDevice(s.Device)
		if errors.Is(err, errNoDevice) {
			plan.Warn("session %s: there is no device %s: until it comes nothing is probed; then weir serve begins, and weir apply does", s.Name, s.Device)
		} else if err != nil {
			return fmt.Errorf("session %q: device %s: %w", s.Name, s.Device, err)
		}
		// Answers are forwarded, and the kernel tells a program of neighbours only by a device that forwards.
		if err == nil && !forwards(s.Device) {
			return fmt.Errorf("session %q: device %s does not forward IPv6, which probes need: sysctl -w net.ipv6.conf.all.forwarding=1", s.Name, s.Device)
		}
	}
	return nil
}

// forwards says whether a device of the calling thread's namespace, and the namespace itself, are a router's.
func forwards(device string) bool {
	for _, of := range []string{"all", device} {
		text, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + of + "/forwarding")
		if err == nil && strings.TrimSpace(string(text)) == "0" {
			return false
		}
	}
	return true
}
