// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"path/filepath"
	"strings"
	"syscall"

	"github.com/weir-project/weir/internal/pidfd"
	"golang.org/x/sys/unix"
)

// gracefulSignals are the signals other than SIGTERM that make a server finish its requests before it exits. SIGTERM
// makes these servers abort requests.
//
// Sources: nginx's "Controlling nginx", HAProxy's management guide section 4, httpd's "Stopping and Restarting",
// php-fpm(8), lighttpd(8).
var gracefulSignals = map[string]syscall.Signal{
	"nginx":    unix.SIGQUIT,
	"angie":    unix.SIGQUIT,
	"haproxy":  unix.SIGUSR1,
	"httpd":    unix.SIGWINCH,
	"apache2":  unix.SIGWINCH,
	"php-fpm":  unix.SIGQUIT,
	"lighttpd": unix.SIGINT,
}

// gracefulSignal returns the signal for a graceful exit, by the name of the executable. A private copy, or the file in
// a container, has the same name. The default is SIGTERM, also if the name is unreadable.
func gracefulSignal(pid int) syscall.Signal {
	exe, err := pidfd.Readlink(pid, "exe")
	if err != nil {
		return unix.SIGTERM
	}
	name := filepath.Base(strings.TrimSuffix(exe, " (deleted)"))               // the suffix marks a file replaced by an upgrade
	for _, n := range []string{name, strings.TrimRight(name, "0123456789.")} { // php-fpm8.2
		if sig, ok := gracefulSignals[n]; ok {
			return sig
		}
	}
	return unix.SIGTERM
}
