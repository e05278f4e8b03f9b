// SPDX-License-Identifier: Apache-2.0

// Package host is the whole host: it loads the configuration, has the features
// plan and apply their parts of it, reads them for status and metrics, and runs
// what needs a process.
package host
